#!/usr/bin/env python3
"""Opens pages of `slat report` in a headless browser, and checks them as readers view them: on a
wide screen, on a phone, in dark mode, and printed. Usage: report_browser.py BROWSER FOLDER PAGE...;
the screenshots go to FOLDER.

The script drives the browser through its debugging pipe (file descriptors 3 and 4; JSON messages,
each ended by a zero byte), so that it needs only Python.
"""

import base64
import json
import os
import pathlib
import re
import select
import struct
import subprocess
import sys
import tempfile
import time
import zlib

# Seconds that the browser has for one command.
TIMEOUT_S = 30

# Name, width, height, whether it is a phone, color scheme.
SCREENS = [
    ("desktop", 1280, 900, False, "light"),
    ("phone", 360, 740, True, "light"),
    ("dark", 1280, 900, False, "dark"),
]

# The checks that run in the page. Each problem is a line.
LOOK = r"""
(() => {
  const problems = [];
  const page = document.documentElement;
  if (page.scrollWidth > page.clientWidth)
    problems.push(`the page is ${page.scrollWidth} px wide, the screen ${page.clientWidth}`);
  for (const box of document.querySelectorAll('.scroll, figure, article, h1, h2, h3, p')) {
    const { left, right, width } = box.getBoundingClientRect();
    if (width && (left < -1 || right > page.clientWidth + 1)) problems.push(`${box.tagName}.${box.className} reaches over the edge`);
  }
  const plots = [...document.querySelectorAll('svg.drawing')];
  for (const plot of plots) {
    const name = plot.querySelector('title')?.textContent;
    const frame = plot.getBoundingClientRect();
    if (!(frame.width > 100 && frame.height > 50)) problems.push(`plot "${name}" is ${frame.width} x ${frame.height}`);
    if (!name || !plot.querySelector('desc')?.textContent) problems.push('a plot has no title or description');
    for (const id of (plot.getAttribute('aria-labelledby') || '').split(' '))
      if (!document.getElementById(id)) problems.push(`plot "${name}" is named by ${id}, which is not there`);
    if (plot.querySelectorAll('rect, polyline, circle, polygon').length < 2) problems.push(`plot "${name}" shows nothing`);
    if (!plot.parentElement.querySelector('details table')) problems.push(`plot "${name}" has no table of its data`);
    const texts = [...plot.querySelectorAll('text')].map(text => [text.textContent.trim(), text.getBoundingClientRect()]);
    for (const [text, { left, right, top, bottom, height }] of texts) {
      if (left < frame.left - 1 || right > frame.right + 1 || top < frame.top - 2 || bottom > frame.bottom + 2)
        problems.push(`plot "${name}": "${text}" is cut off`);
      if (height < 9 || height > 30) problems.push(`plot "${name}": "${text}" is ${height} px high`);
    }
    // Labels of an axis side by side; one that lies in another cannot be read.
    for (let i = 0; i < texts.length; i++)
      for (let j = i + 1; j < texts.length; j++) {
        const [[a, p], [b, q]] = [texts[i], texts[j]];
        const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
        const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
        if (wide > 1 && high > 5) problems.push(`plot "${name}": "${a}" and "${b}" overlap`);
      }
  }
  const luminance = color => {
    const [r, g, b] = color.match(/[\d.]+/g).map(Number).map(c => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(document.body);
  const paper = luminance(style.backgroundColor);
  const contrast = color => {
    const ink = luminance(color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  };
  const inks = new Set();
  for (const element of document.querySelectorAll('svg.drawing text, p, th, td, .note, .good, .bad, summary')) {
    const color = getComputedStyle(element)[element.tagName === 'text' ? 'fill' : 'color'];
    // Letters on parts of bars stand on the part.
    if (!(element.tagName === 'text' && /^[a-z]$/.test(element.textContent.trim()))) inks.add(color);
  }
  for (const ink of inks) if (contrast(ink) < 4.5) problems.push(`text in ${ink} on ${style.backgroundColor} is hard to read`);
  const lines = new Set([...document.querySelectorAll('svg.drawing polyline[stroke-width="4"]')].map(line => getComputedStyle(line).stroke));
  for (const line of lines) if (contrast(line) < 3) problems.push(`a line in ${line} on ${style.backgroundColor} is hard to see`);
  return { problems, plots: plots.length, paper, height: page.scrollHeight,
           said: document.body.innerText.length };
})()
"""


class Browser:
    """A headless browser with one page."""

    def __init__(self, name):
        self.profile = tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True)
        to_browser, self.out = os.pipe()
        self.into, from_browser = os.pipe()

        def pipes():
            # Above the final numbers, so that neither replaces the other.
            a, b = os.dup2(to_browser, 13), os.dup2(from_browser, 14)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [name, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
             "--disable-dev-shm-usage", "--disable-background-networking", "--remote-debugging-pipe",
             f"--user-data-dir={self.profile.name}", "about:blank"],
            preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.rest, self.id, self.session, self.events = b"", 0, None, []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Network"]:
            self.ask(f"{domain}.enable")

    def receive(self, deadline):
        """Returns the next message."""
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                sys.exit("the browser does not answer")
            got = os.read(self.into, 1 << 20)
            if not got:
                sys.exit("the browser ended")
            self.rest += got
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def ask(self, method, **params):
        """Runs a command and returns its result."""
        self.id += 1
        command = {"id": self.id, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.out, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            message = self.receive(deadline)
            if message.get("id") == self.id:
                if "error" in message:
                    sys.exit(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def wait_for(self, method):
        """Waits for an event."""
        deadline = time.monotonic() + TIMEOUT_S
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self.receive(deadline))

    def evaluate(self, text):
        answer = self.ask("Runtime.evaluate", expression=text, returnByValue=True)
        if "exceptionDetails" in answer:
            sys.exit(f"the page cannot be asked: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def open(self, url, width, height, is_phone, scheme):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if is_phone else 1,
                 mobile=is_phone)
        self.ask("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.ask("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def complaints(self, url):
        """Messages of the console, and requests for other files than the page."""
        lines = []
        for event in self.events:
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled":
                    lines.append(f"console: {params}")
                case "Log.entryAdded":
                    lines.append(f"console: {params['entry'].get('text')}")
                case "Network.requestWillBeSent":
                    asked = params["request"]["url"]
                    if asked != url and not asked.startswith("data:"):
                        lines.append(f"it asks for {asked}")
        return lines

    def screenshot(self, width, height, scale):
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=TIMEOUT_S)
        self.profile.cleanup()


def pixels(png):
    """Pixels of a PNG with 8 bits for each of its channels, as (red, green, blue)."""
    data, place, header = b"", 8, None
    while place < len(png):
        (length,) = struct.unpack(">I", png[place:place + 4])
        kind, body = png[place + 4:place + 8], png[place + 8:place + 8 + length]
        if kind == b"IHDR":
            header = struct.unpack(">IIBBBBB", body)
        elif kind == b"IDAT":
            data += body
        place += 12 + length
    width, height, depth, color = header[:4]
    assert depth == 8 and color in (2, 6), header
    step = 3 if color == 2 else 4
    raw, before, found = zlib.decompress(data), bytearray(width * step), []
    for row in range(height):
        start = row * (width * step + 1)
        how, line = raw[start], bytearray(raw[start + 1:start + 1 + width * step])
        for i in range(len(line)):
            a = line[i - step] if i >= step else 0
            b = before[i]
            c = before[i - step] if i >= step else 0
            if how == 1:
                line[i] = (line[i] + a) & 255
            elif how == 2:
                line[i] = (line[i] + b) & 255
            elif how == 3:
                line[i] = (line[i] + (a + b) // 2) & 255
            elif how == 4:
                p = a + b - c
                near = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
                line[i] = (line[i] + near) & 255
        found += [tuple(line[i:i + 3]) for i in range(0, len(line), step)]
        before = line
    return found


def look_at(png, scheme):
    """Checks that a screenshot has several colors, and is bright or dark as a whole."""
    found = pixels(png)
    nr_colors = len(set((r >> 4, g >> 4, b >> 4) for r, g, b in found))
    brightness = sum(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in found) / len(found) / 255
    if nr_colors < 8:
        yield f"the screenshot has {nr_colors} colors only"
    if scheme == "dark" and brightness > 0.3:
        yield f"dark mode is not dark: {brightness:.2f}"
    if scheme == "light" and brightness < 0.7:
        yield f"the page is dark: {brightness:.2f}"


def check(browser, page, folder):
    """Returns all problems of a page, and the number of its plots."""
    url = page.resolve().as_uri()
    plots = page.read_text().count('<svg class="drawing"')
    problems = []
    for name, width, height, is_phone, scheme in SCREENS:
        browser.open(url, width, height, is_phone, scheme)
        # Collapsed tables must fit too.
        for folded in [True, False]:
            if not folded:
                browser.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
            seen = browser.evaluate(LOOK)
            problems += [f"{name}{'' if folded else ', unfolded'}: {problem}" for problem in seen["problems"]]
            if folded:
                height = seen["height"]
                (folder / f"{page.stem}_{name}.png").write_bytes(browser.screenshot(width, min(height, 16000), 1))
                # Enough to detect a blank or dark page; Python is slow on pixels.
                small = browser.screenshot(width, min(height, 4000), 0.2)
                problems += [f"{name}: {problem}" for problem in look_at(small, scheme)]
        if seen["plots"] != plots:
            problems.append(f"{name}: {seen['plots']} of {plots} plots are there")
        if (seen["paper"] < 0.1) != (scheme == "dark"):
            problems.append(f"{name}: the background has a luminance of {seen['paper']:.2f}")
        if seen["said"] < 200:
            problems.append(f"{name}: the page says nothing")
        problems += [f"{name}: {line}" for line in browser.complaints(url)]
    problems += [f"print: {problem}" for problem in check_print(browser, url, page, folder)]
    return problems, plots


def check_print(browser, url, page, folder):
    """A4 with the margins of the style sheet, from a screen in dark mode."""
    browser.open(url, 703, 1000, False, "dark")
    browser.ask("Emulation.setEmulatedMedia", media="print")
    seen = browser.evaluate(LOOK)
    yield from seen["problems"]
    if seen["paper"] < 0.9:
        yield f"the paper is dark: {seen['paper']:.2f}"
    pdf = base64.b64decode(browser.ask("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])
    (folder / f"{page.stem}.pdf").write_bytes(pdf)
    nr_pages = len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf))
    if not pdf.startswith(b"%PDF") or nr_pages == 0:
        yield "nothing can be printed"
    # Expanded tables are printed too.
    browser.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
    clipped = browser.evaluate("[...document.querySelectorAll('.scroll')].filter(it => it.scrollWidth > it.clientWidth + 1)"
                               ".map(it => `${it.getAttribute('aria-label')}: ${it.scrollWidth} px in ${it.clientWidth}`)")
    yield from (f"a table is clipped ({table})" for table in clipped)


def main():
    name, folder, *pages = sys.argv[1:]
    folder = pathlib.Path(folder)
    browser = Browser(name)
    failed = False
    for page in map(pathlib.Path, pages):
        problems, plots = check(browser, page, folder)
        print(f"{page.name}: {plots} plots, {len(problems)} problems", flush=True)
        # The first lines are enough: one problem often occurs many times.
        for problem in list(dict.fromkeys(problems))[:12]:
            print(f"  {problem}")
        failed |= bool(problems)
    browser.close()
    sys.exit(failed)


if __name__ == "__main__":
    main()
