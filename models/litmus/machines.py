"""The machines of the litmus tests, and what a compiler makes of Rust's atomic operations there.

| letter | machine |
|---|---|
| a | AArch64 without LSE: pairs of exclusive loads and stores |
| l | AArch64 with LSE: single atomic instructions |
| r | RISC-V |
| x | x86-64 |

The instructions are those of LLVM, as `rustc --emit asm` (1.95) prints them for `aarch64-unknown-none-softfloat`
without and with `-C target-feature=+lse,+rcpc`, `riscv64imac-unknown-none-elf` and `x86_64-unknown-linux-gnu`. They
are those of "C/C++11 mappings to processors" (https://www.cl.cam.ac.uk/~pes20/cpp/cpp0xmappings.html) and of appendix
A of the RISC-V unprivileged specification. Where there is a choice, the tests have the weaker instruction:
- A load with acquire is `LDAPR` on AArch64; without FEAT_LRCPC it is `LDAR`.
- A sequentially consistent store on RISC-V has no fence behind it, as older compilers make it.
A fence on x86-64 is `MFENCE`; LLVM makes it of a locked OR. A locked instruction is a full fence (Intel SDM vol. 3A,
10.2.2; AMD APM vol. 2, 7.4.2).

Left out of a compare-and-exchange are its branches: they would only order more. `fence_after_rmw` is no instruction
on x86-64, and `fence_against_remote_barrier` is none anywhere (`crates/slat/src/sync/mod.rs`).
"""


class Thread:
    """Registers and instructions of a thread."""

    def __init__(self, registers):
        self.free = list(registers)
        self.init = {}
        self.named = {}
        self.lines = []
        #: What the condition must say beside the test's own: register and value.
        self.also = []

    def new(self):
        return self.free.pop(0)

    def holding(self, what):
        """A register that has a value or the address of a location from the beginning."""
        for register, held in self.init.items():
            if held == what:
                return register
        register = self.new()
        self.init[register] = what
        return register

    def result(self, op):
        register = self.new()
        if op.reg:
            self.named[op.reg] = register
        return register

    def add(self, *lines):
        self.lines += lines


class Machine:
    #: As herd7 names the architecture.
    herd = ""
    #: The line for people.
    title = ""
    registers = ()

    def thread(self, ops):
        thread = Thread(self.registers)
        for op in ops:
            getattr(self, op.kind)(thread, op)
        return thread


def is_acquire(order):
    return order in ("Acquire", "AcqRel", "SeqCst")


def is_release(order):
    return order in ("Release", "AcqRel", "SeqCst")


class AArch64(Machine):
    herd = "AArch64"
    registers = [f"X{n}" for n in range(29)]

    @staticmethod
    def w(register):
        return "W" + register[1:]

    def address(self, thread, op):
        base = thread.holding(op.loc)
        if not op.addr:
            return f"[{base}]"
        zero, address = thread.new(), thread.new()
        seen = self.w(thread.named[op.addr])
        thread.add(f"EOR {self.w(zero)},{seen},{seen}", f"ADD {address},{base},{self.w(zero)},SXTW")
        return f"[{address}]"

    def load(self, thread, op):
        address = self.address(thread, op)
        name = {"Relaxed": "LDR", "Acquire": "LDAPR", "SeqCst": "LDAR"}[op.order]
        thread.add(f"{name} {self.w(thread.result(op))},{address}")

    def store(self, thread, op):
        address = self.address(thread, op)
        name = {"Relaxed": "STR", "Release": "STLR", "SeqCst": "STLR"}[op.order]
        thread.add(f"{name} {self.w(thread.holding(op.value))},{address}")

    def fence(self, thread, op):
        if op.order == "Acquire":
            thread.add("DMB ISHLD")
        elif op.order != "fence_against_remote_barrier":
            thread.add("DMB ISH")


class Exclusives(AArch64):
    title = "AArch64"

    def rmw(self, thread, op):
        address = self.address(thread, op)
        value, found, failed = thread.holding(op.value), thread.result(op), thread.new()
        load = "LDAXR" if is_acquire(op.order) else "LDXR"
        store = "STLXR" if is_release(op.order) else "STXR"
        thread.add(f"{load} {self.w(found)},{address}", f"{store} {self.w(failed)},{self.w(value)},{address}")
        thread.also.append((failed, 0))
        if op.kind == "cas":
            thread.also.append((found, op.expected))

    cas = rmw


class Lse(AArch64):
    title = "AArch64 with LSE"

    @staticmethod
    def suffix(op):
        return "A" * is_acquire(op.order) + "L" * is_release(op.order)

    def rmw(self, thread, op):
        address = self.address(thread, op)
        value, found = thread.holding(op.value), thread.result(op)
        thread.add(f"SWP{self.suffix(op)} {self.w(value)},{self.w(found)},{address}")

    def cas(self, thread, op):
        address = self.address(thread, op)
        value, found = thread.holding(op.value), thread.result(op)
        thread.init[found] = op.expected
        thread.add(f"CAS{self.suffix(op)} {self.w(found)},{self.w(value)},{address}")
        thread.also.append((found, op.expected))


class RiscV(Machine):
    herd = "RISCV"
    title = "RISC-V"
    registers = [f"x{n}" for n in range(5, 32)]

    def address(self, thread, op):
        base = thread.holding(op.loc)
        if not op.addr:
            return base
        zero, address = thread.new(), thread.new()
        seen = thread.named[op.addr]
        thread.add(f"xor {zero},{seen},{seen}", f"add {address},{zero},{base}")
        return address

    def load(self, thread, op):
        address = self.address(thread, op)
        if op.order == "SeqCst":
            thread.add("fence rw,rw")
        thread.add(f"lw {thread.result(op)},0({address})")
        if op.order != "Relaxed":
            thread.add("fence r,rw")

    def store(self, thread, op):
        address = self.address(thread, op)
        if op.order != "Relaxed":
            thread.add("fence rw,w")
        thread.add(f"sw {thread.holding(op.value)},0({address})")

    def rmw(self, thread, op):
        address = self.address(thread, op)
        value, found = thread.holding(op.value), thread.result(op)
        suffix = ".aq" * is_acquire(op.order) + ".rl" * is_release(op.order)
        thread.add(f"amoswap.w{suffix} {found},{value},({address})")

    def cas(self, thread, op):
        address = self.address(thread, op)
        value, found, failed = thread.holding(op.value), thread.result(op), thread.new()
        load = {"SeqCst": ".aq.rl", "Acquire": ".aq", "AcqRel": ".aq"}.get(op.order, "")
        store = ".rl" if is_release(op.order) else ""
        thread.add(f"lr.w{load} {found},({address})", f"sc.w{store} {failed},{value},({address})")
        thread.also += [(failed, 0), (found, op.expected)]

    def fence(self, thread, op):
        name = {"Acquire": "fence r,rw", "Release": "fence rw,w", "fence_against_remote_barrier": ""}
        line = name.get(op.order, "fence rw,rw")
        if line:
            thread.add(line)


class X86(Machine):
    herd = "X86_64"
    title = "x86-64"
    registers = ["rax", "rbx", "rcx", "rdx", "rsi", "rdi"] + [f"r{n}" for n in range(8, 16)]

    @staticmethod
    def half(register):
        """The name of its 32 bits."""
        return "%" + (f"{register}d" if register[1].isdigit() else "e" + register[1:])

    def load(self, thread, op):
        # TSO keeps loads in order: an address that depends on a load orders no more.
        thread.add(f"movl ({op.loc}),{self.half(thread.result(op))}")

    def store(self, thread, op):
        if op.order == "SeqCst":
            self.rmw(thread, op)
        else:
            thread.add(f"movl ${op.value},({op.loc})")

    def rmw(self, thread, op):
        register = thread.result(op)
        thread.init[register] = op.value
        thread.add(f"xchgl ({op.loc}),{self.half(register)}")

    def cas(self, thread, op):
        self.rmw(thread, op)
        [register] = list(thread.init)[-1:]
        thread.also.append((register, op.expected))

    def fence(self, thread, op):
        if op.order in ("full_fence", "SeqCst"):
            thread.add("mfence")


MACHINES = {"a": Exclusives(), "l": Lse(), "r": RiscV(), "x": X86()}


def litmus(test, machine):
    """The test in herd7's format."""
    threads = [machine.thread(ops) for ops in test.threads]
    init = [f"{location}={value};" for location, value in sorted(test.first.items())]
    if machine.herd == "X86_64":
        locations = sorted({op.loc for ops in test.threads for op in ops if op.loc})
        init = [f"[{location}]={test.first.get(location, 0)};" for location in locations]
    for number, thread in enumerate(threads):
        held = [f"{number}:{register}={value};" for register, value in thread.init.items()]
        init += [" ".join(held)] if held else []
    height = max(len(thread.lines) for thread in threads)
    columns = []
    for number, thread in enumerate(threads):
        lines = [f"P{number}"] + thread.lines + [""] * (height - len(thread.lines))
        width = max(map(len, lines))
        columns.append([line.ljust(width) for line in lines])
    rows = [" " + " | ".join(row) + " ;" for row in zip(*columns)]
    head = [f"{machine.herd} {test.name}", f'"{test.about}"', "{", *init, "}"]
    return "\n".join([*head, *rows, f"exists ({condition(test, threads)})", ""])


def condition(test, threads):
    parts = []
    for part in test.never.split():
        where, value = part.split("=")
        if where.startswith("["):
            parts.append(f"{where}={value}")
        else:
            number, name = where.split(":")
            parts.append(f"{number}:{threads[int(number)].named[name]}={value}")
    for number, thread in enumerate(threads):
        parts += [f"{number}:{register}={value}" for register, value in thread.also]
    return " /\\ ".join(parts)
