//! `slat report` for its user: the contents of the page, one clear line for each file that is no
//! result, and a page that is written as a whole or not at all. `ci/report.sh` checks the layout in
//! a browser.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{assert_ok, assert_refused, read, slat, stderr};
use serde_json::{Value, json};

/// A new folder for a test.
fn folder(test: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("report").join(test);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Writes results, and returns the page of `slat report`.
#[track_caller]
fn page(test: &str, results: &[Value]) -> String {
    let folder = folder(test);
    let mut args = "report".to_owned();
    for (index, result) in results.iter().enumerate() {
        let path = folder.join(format!("r{index}.json"));
        fs::write(&path, result.to_string()).unwrap();
        args += &format!(" {}", path.display());
    }
    page_of(&args, &folder)
}

#[track_caller]
fn page_of(args: &str, folder: &Path) -> String {
    let path = folder.join("page.html");
    let said = assert_ok(&format!("{args} -o {}", path.display()));
    let html = fs::read_to_string(&path).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains(&path.display().to_string()) && said.contains(&format!("{} plots", nr_plots(&html))),
        "{said}"
    );
    assert_alone(&html);
    html
}

fn nr_plots(html: &str) -> usize {
    html.matches("<svg class=\"drawing\"").count()
}

/// The page refers to nothing outside, and has no scripts.
#[track_caller]
fn assert_alone(html: &str) {
    for what in ["http:", "https:", "//", "<script", "<img", "<iframe", "src=", "url(", "@import", "onload", "NaN"] {
        let found = html.find(what).map(|place| &html[place.saturating_sub(40)..(place + 40).min(html.len())]);
        assert_eq!(found, None, "{what}");
    }
    assert_eq!(html.matches("href=").count() - html.matches("href=\"#").count(), 1, "only the icon, which is empty");
    assert!(html.starts_with("<!DOCTYPE html>") && html.ends_with("</html>"));
}

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

/// A result as an experiment writes it.
fn result(figures: Value) -> Value {
    json!({
        "schema": 1, "slat": "0.1.0", "time": "2026-01-02T03:04:05Z", "experiment": "parallel-faults",
        "command": ["slat", "parallel-faults", "-v", "2"], "config": { "vcpus": 2 }, "interrupted": false,
        "host": { "cpu_model": "A CPU", "cpus": 2, "kernel": "6.1", "memory_bytes": 1 << 30, "measured_on": "software CPUs" },
        "results": figures,
    })
}

/// A figure of one run.
fn figure(name: &str, value: impl Into<Value>, unit: &str, labels: Value) -> Value {
    json!({ "name": name, "unit": unit, "labels": labels, "samples": [value.into()] })
}

/// A time of five runs.
fn measured(name: &str, median: f64, noise: f64) -> Value {
    let samples = [-2.0, -1.0, 0.0, 1.0, 2.0].map(|step| median + step * noise);
    json!({ "name": name, "unit": "s", "better": "less", "labels": { "of": name }, "samples": samples })
}

/// Checks that the texts occur in this order.
#[track_caller]
fn assert_in_order(html: &str, texts: &[&str]) {
    let mut from = 0;
    for text in texts {
        let place = html[from..].find(text).unwrap_or_else(|| panic!("no {text:?} behind {:?}", &html[..from].len()));
        from += place + text.len();
    }
}

#[test]
fn each_experiment_has_its_plots_and_tables() {
    for (sample, titles) in [
        ("parallel_faults", &["Phases", "Phases after populating", "Stalls of the guest in a fault"][..]),
        ("userfault", &["Paging rate: backing anonymous"]),
        ("dirty_log", &["Harvest of the dirty log"]),
        ("numa_split", &["Walks that read a leaf's table", "Phases"]),
        ("shadow", &["Guest time", "Load of CR3"]),
        ("stress", &[]),
    ] {
        let path = samples().join(format!("{sample}.json"));
        let html = page_of(&format!("report {}", path.display()), &folder(sample));
        for title in titles {
            let escaped = title.replace('\'', "&#39;");
            assert!(html.contains(title) || html.contains(&escaped), "{sample}: no plot {title}");
        }
        assert!(nr_plots(&html) >= titles.len(), "{sample}: {} plots", nr_plots(&html));
        // Each plot has a description and a table of its data.
        assert_eq!(html.matches("role=\"img\" aria-labelledby=").count(), nr_plots(&html));
        assert_eq!(html.matches("<summary>Data</summary>").count(), nr_plots(&html));
        let object: Value = read(&path);
        let words: Vec<&str> =
            object["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
        assert_in_order(
            &html,
            &[
                "Command",
                &words.join(" "),
                "Begun",
                object["host"]["cpu_model"].as_str().unwrap(),
                "All figures",
                "Mean of the middle half ± robust deviation",
            ],
        );
    }
}

#[test]
fn a_comparison_shows_each_system_with_what_was_published() {
    let path = samples().join("compare.json");
    let html = page_of(&format!("report {}", path.display()), &folder("compare"));
    let object = &read(&path)["compared"];
    let claims = &object["claims"];
    assert!(html.contains(&format!("{} of {} claims held", claims["held"], claims["made"])));
    assert_in_order(
        &html,
        &[
            "<h2>parallel-faults. ",
            "published baseline",
            "<h2>userfault. ",
            "<h2>shadow. ",
            "<h2>numa-split. ",
            "<h2>dirty-log. ",
        ],
    );
    for system in object["systems"].as_array().unwrap() {
        for comparison in system["comparisons"].as_array().unwrap() {
            assert!(html.contains(comparison["title"].as_str().unwrap()), "{}", comparison["title"]);
        }
        for not_run in system["not_run"].as_array().unwrap() {
            assert!(html.contains(not_run["why"].as_str().unwrap()), "{not_run}");
        }
    }
    assert!(nr_plots(&html) >= 8, "{}", nr_plots(&html));
}

/// A comparison of one figure, in which slat takes `time`, and the interval of its ratio ends at
/// `ratio`.
fn compared(time: f64, ratio: f64, verdict: &str) -> Value {
    let claim = json!({ "above": 1.0, "verdict": verdict });
    let of = |of: &str| if verdict == of { json!([format!("populate is {of}")]) } else { json!([]) };
    let mut result = result(json!([figure("wall", 100.0, "s", json!({}))]));
    result["experiment"] = "compare".into();
    result["command"] = json!(["slat", "compare"]);
    result["config"] = json!({ "size": "quick", "only": ["parallel-faults"] });
    result["compared"] = json!({
        "systems": [{
            "system": "parallel-faults", "title": "Faults", "published_note": "2021", "experiments": [],
            "not_run": [{ "what": "KVM", "why": "no /dev/kvm" }],
            "comparisons": [{
                "name": "populate", "title": "Populate", "unit": "s", "better": "less",
                "published": { "on": "96 vCPUs", "baseline": 110.193, "proposed": 16.112 },
                "sides": [
                    { "name": "none", "role": "slat", "samples": [time * 0.99, time, time * 1.01],
                      "measured_on": "software CPUs", "ratio": null, "claim": null },
                    { "name": "exclusive", "role": "baseline", "samples": [1.9, 2.0, 2.1], "measured_on": "software CPUs",
                      "ratio": { "value": ratio, "interval": [ratio * 0.9, ratio] }, "claim": claim },
                ],
            }],
        }],
        "claims": { "made": 1, "held": u8::from(verdict == "held"), "ties": of("tie"), "lost": of("lost") },
    });
    result
}

#[test]
fn claims_are_held_or_tied_or_lost_in_words() {
    let held = compared(1.0, 2.0, "held");
    common::assert_form(&held);
    let html = page("held", std::slice::from_ref(&held));
    assert_in_order(
        &html,
        &[
            "✓ 1 of 1 claims held",
            "0 tied, 0 lost",
            "Populate",
            "(less is better)",
            "published baseline",
            "110 s",
            "published proposal",
            "6.84×",
            "16.1 s",
            "96 vCPUs",
            "none",
            "1.00 s [0.99–1.01] (3)",
            "exclusive",
            "2.00× [1.80–2.00]",
            "✓ held",
            "above 1.00×",
            "software CPUs",
            "Not run",
            "KVM",
            "no /dev/kvm",
        ],
    );
    let lost = compared(4.0, 0.5, "lost");
    let html = page("lost", std::slice::from_ref(&lost));
    assert_in_order(&html, &["✗ 0 of 1 claims held", "✗ lost", "populate is lost", "exclusive", "0.50×", "✗ lost"]);
    let html = page("tie", &[compared(1.9, 1.05, "tie")]);
    assert_in_order(
        &html,
        &["✓ 0 of 1 claims held", "1 tied, 0 lost", "tie populate is tie", "exclusive", "1.05×", "tie"],
    );

    let both = page("held_and_lost", &[held, lost]);
    assert_in_order(
        &both,
        &["r0: median", "r1: median", "none", "1.00 s", "4.00 s", "✗ 0.25× as good", "beyond noise"],
    );
    assert_in_order(&both, &["exclusive", "2.00× [1.80–2.00] / 0.50×", "✓ held", "✗ lost", "same"]);
}

#[test]
fn changes_are_sorted_and_compared_with_the_noise() {
    let once = |value: f64| figure("once", value, "s", json!({}));
    let before = [
        measured("big", 1.0, 0.01),
        measured("small", 1.0, 0.01),
        measured("noisy", 1.0, 0.3),
        once(1.0),
        measured("still", 1.0, 0.1),
        measured("gone", 1.0, 0.1),
    ];
    let after = [
        measured("small", 1.1, 0.01),
        measured("big", 0.25, 0.01),
        measured("noisy", 1.4, 0.3),
        once(3.0),
        measured("still", 1.0, 0.1),
        measured("new", 1.0, 0.1),
    ];
    let results = [result(before.to_vec().into()), result(after.to_vec().into())];
    common::assert_form(&results[0]);
    let html = page("changes", &results);
    assert!(
        html.contains(
            "5 figures are in two results or more: <strong>2 changed beyond noise</strong>, 1 within, 1 with unknown noise"
        ),
        "{html}"
    );
    assert_in_order(
        &html,
        &[
            "What changed",
            "<table class=\"changes\">",
            "Big",
            "1.00 s [0.99–1.01] (5)",
            "250 ms [237–263] (5)",
            "0.25×, better beyond noise",
            "Small",
            "1.10×, worse beyond noise",
            "Changed, noise unknown (1)",
            "Once",
            "3.00×",
            "Changed within noise (1)",
            "Noisy",
            "1.40×",
            "The same (1)",
            "Still",
        ],
    );
    assert!(!html.contains("Not the same experiment"));

    let mut other = results[1].clone();
    other["config"]["vcpus"] = 8.into();
    let html = page("settings", &[results[0].clone(), other]);
    assert_in_order(&html, &["Not the same experiment", "slat parallel-faults -v 2", "vcpus: 2 / 8"]);

    let mut other = results[1].clone();
    other["experiment"] = "aging".into();
    assert!(page("nothing_in_common", &[results[0].clone(), other]).contains("no figure in common"));
}

#[test]
fn a_before_and_an_after_are_in_one_plot() {
    let path = |name: &str| samples().join(format!("{name}.json")).display().to_string();
    let one = page_of(&format!("report {}", path("compare")), &folder("before"));
    let two = page_of(&format!("report {} {}", path("compare"), path("compare_after")), &folder("before_after"));
    assert_eq!(nr_plots(&one), nr_plots(&two));
    for text in ["lock none · compare:", "lock none · compare_after:", "slat · compare_after"] {
        assert!(two.contains(text), "{text}");
    }
}

#[test]
fn a_peer_has_a_column_that_says_what_it_was_measured_on() {
    let figures = json!([
        figure("dirty_memory", 1.0, "s", json!({ "lock": "none" })),
        figure("dirty_memory", 2.0, "s", json!({ "lock": "kvm", "measured_on": "hardware" })),
        figure("tables", 3.0, "count", json!({ "lock": "none", "node": 0 })),
        figure("tables", 4.0, "count", json!({ "lock": "none", "node": 1 })),
    ]);
    let html = page("peer", &[result(figures)]);
    assert_in_order(
        &html,
        &[
            "All figures",
            ">none</th>",
            ">kvm, measured on hardware</th>",
            ">Dirty memory</th><td>1.00 s</td><td>2.00 s</td>",
        ],
    );
    assert_in_order(&html, &[">Tables, node 0</th><td>3</td><td>–</td>", ">Tables, node 1</th><td>4</td><td>–</td>"]);
}

#[test]
fn fifty_results_fit() {
    let results: Vec<Value> = (0..50).map(|index| result(json!([measured("figure", f64::from(index), 0.0)]))).collect();
    let html = page("fifty", &results);
    assert!(html.contains("r49") && html.contains("1 figures are in two results or more"));
}

#[test]
fn text_of_a_result_is_text() {
    let evil = "<script>alert('x')</script>\"&<b>";
    let mut result = result(json!([
        figure("dirty_memory", 1.0, "s", json!({ evil: evil })),
        figure("dirty_memory", 2.0, "s", json!({ evil: "other" })),
        figure(evil, 1.0, "s", json!({ "lock": evil })),
        figure("paging_rate", 1.0, "1/s", json!({ "vcpus": 1, "mode": evil })),
        figure("paging_rate", 2.0, "1/s", json!({ "vcpus": 2, "mode": evil })),
    ]));
    result["command"] = json!(["slat", evil]);
    result["experiment"] = evil.into();
    result["time"] = evil.into();
    result["slat"] = evil.into();
    result["config"] = json!({ evil: evil });
    for key in ["cpu_model", "kernel", "measured_on", "flush_method", "kvm"] {
        result["host"][key] = evil.into();
    }
    result["histograms"] =
        json!([{ "name": evil, "unit": "s", "labels": { "lock": evil }, "buckets": [[1, 1], [2, 3]] }]);
    let html = page("evil", &[result.clone()]);
    assert!(!html.contains("<b>") && !html.contains("<script") && html.contains("&lt;script&gt;"));
    assert!(nr_plots(&html) >= 3);
    page("evil_twice", &[result.clone(), result]);

    let text = compared(1.0, 2.0, "held")
        .to_string()
        .replace("96 vCPUs", "<b>")
        .replace("Populate", "<b>")
        .replace("KVM", "<b>");
    let text = text.replace("software CPUs", "<b>").replace("exclusive", "<b>").replace("Faults", "<b>");
    assert!(!page("evil_comparison", &[serde_json::from_str(&text).unwrap()]).contains("<b>"));
}

#[test]
fn values_that_an_axis_cannot_show_are_left_out_and_counted() {
    let harvest =
        |value: Value, pages: Value| figure("get_dirty_log", value, "s", json!({ "method": "slat", "pages": pages }));
    let values = [json!(10.0), json!(0), json!(-5), json!(1e300), json!(1e-300), json!(2000.0)];
    let figures: Vec<Value> =
        values.into_iter().enumerate().map(|(index, value)| harvest(value, (1 << index).into())).collect();
    let html = page("odd_values", &[result(figures.into())]);
    assert_eq!(nr_plots(&html), 1);
    assert!(html.contains("Not drawn: 4 values"), "{html}");

    // No value to draw, or no axis to draw it along.
    for (name, figures) in [
        ("zeros", vec![harvest(0.into(), 1.into()), harvest(0.into(), 2.into())]),
        ("words", vec![harvest(1.into(), "many".into())]),
        ("nothing", vec![json!({ "name": "get_dirty_log", "unit": "s", "labels": { "pages": 1 }, "samples": [] })]),
        ("huge", vec![figure("dirty_memory", 1e308, "s", json!({})), figure("populate_memory", 1e308, "s", json!({}))]),
    ] {
        assert_eq!(nr_plots(&page(name, &[result(figures.into())])), 0, "{name}");
    }
    // One value is a bar, and one run has no deviation.
    let html = page("one_value", &[result(json!([harvest(5.into(), 1.into()), harvest(6.into(), 1.into())]))]);
    assert_eq!(nr_plots(&html), 1);
    let html = page("one_run", &[result(json!([figure("dirty_memory", 1.0, "s", json!({}))]))]);
    assert!(html.contains("median [quartiles] of 1 sample") && !html.contains("1.00 ±"), "{html}");
    // Far apart, and as close as two numbers can be.
    let apart = [1e-90, 1e90].map(|value| harvest(value.into(), value.into()));
    let close = [1.0, 1.0 + f64::EPSILON].map(|value| harvest(value.into(), value.into()));
    page("apart", &[result(apart.to_vec().into())]);
    page("close", &[result(close.to_vec().into())]);
    for (median, noise) in [(1e300, 1e300), (1e-300, 1e-300), (0.0, 0.0), (-1.0, 1e300)] {
        let results = [1.0, 0.5].map(|factor| result(json!([measured("dirty_memory", median * factor, noise)])));
        page("extreme", &results);
    }
}

#[test]
fn an_interrupted_result_is_marked() {
    let mut one = result(json!([measured("dirty_memory", 1.0, 0.1)]));
    one["interrupted"] = true.into();
    assert!(page("interrupted", &[one]).contains("Interrupted"));
    let mut whole = compared(1.0, 2.0, "held");
    whole["interrupted"] = true.into();
    assert!(page("interrupted_compare", &[whole]).contains("Interrupted"));
}

#[test]
fn what_a_newer_slat_adds_is_ignored() {
    let mut new = result(json!([measured("walks", 1.0, 0.1)]));
    new["experiment"] = "teleport".into();
    new["new_field"] = json!({ "a": [1] });
    new["results"][0]["new_field"] = 1.into();
    let html = page("unknown", &[new]);
    assert_in_order(&html, &["slat parallel-faults -v 2", "<details open>", "Walks"]);
}

#[test]
fn files_that_are_no_results_are_refused_in_one_line() {
    let folder = folder("refused");
    let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
    let good = result(json!([measured("figure", 1.0, 0.1)]));
    // With another value of one field.
    let with = |field: &str, value: Value| {
        let mut result = good.clone();
        result[field] = value;
        result.to_string()
    };
    write("good.json", &good.to_string());
    write("empty.json", " \n");
    write("cut.json", "{\"experiment\": \"parallel-faults\", \"results\": [");
    write("text.json", "Phases of a migration\n");
    write("array.json", "[1, 2]");
    write("other.json", "{\"name\": \"package\", \"version\": \"1\"}");
    write("old.json", &with("schema", 0.into()));
    write("no_results.json", &with("results", Value::Null));
    write("bad_results.json", &with("results", json!([{ "name": 5 }])));
    write("bad_value.json", &with("results", json!([figure("a", "fast", "s", json!({}))])));
    write("bad_unit.json", &with("results", json!([figure("a", 1, "ns", json!({}))])));
    write("no_figures.json", &with("results", json!([])));
    let mut stopped: Value = serde_json::from_str(&with("interrupted", true.into())).unwrap();
    stopped["results"] = json!([]);
    write("stopped.json", &stopped.to_string());
    write(
        "no_systems.json",
        &with("compared", json!({ "systems": [], "claims": { "made": 0, "held": 0, "ties": [], "lost": [] } })),
    );
    write("huge.json", &good.to_string().replace("1.1", "1e999"));
    write("deep.json", &"[".repeat(100_000));
    fs::write(folder.join("binary.json"), [0xff, 0xfe, 0]).unwrap();
    let at = folder.display();
    let output = folder.join("page.html");
    for (files, what) in [
        (format!("{at}/missing.json"), "missing.json: No such file"),
        (format!("{at}"), "Is a directory"),
        (format!("{at}/empty.json"), "is empty"),
        (format!("{at}/cut.json"), "is not JSON"),
        (format!("{at}/text.json"), "is not JSON"),
        (format!("{at}/binary.json"), "is not JSON"),
        (format!("{at}/deep.json"), "is not JSON"),
        (format!("{at}/huge.json"), "is not JSON"),
        (format!("{at}/array.json"), "not an object"),
        (format!("{at}/other.json"), "names no schema"),
        (format!("{at}/old.json"), "its schema is 0, and this slat reads 1"),
        (format!("{at}/no_results.json"), "invalid type"),
        (format!("{at}/bad_unit.json"), "unknown variant `ns`"),
        (format!("{at}/bad_results.json"), "invalid type"),
        (format!("{at}/bad_value.json"), "invalid type"),
        (format!("{at}/no_figures.json"), "holds no figures; run its command again: slat parallel-faults -v 2"),
        (format!("{at}/stopped.json"), "interrupted; run its command again: slat parallel-faults -v 2"),
        (format!("{at}/no_systems.json"), "holds no figures"),
        (format!("{at}/good.json {at}/text.json"), "text.json is not JSON"),
        (format!("{at}/good.json {at}/../refused/good.json"), "is there twice"),
        ("/dev/zero".to_owned(), "name files that --json wrote"),
        (String::new(), "RESULT.json"),
    ] {
        assert_refused(&format!("report {files} -o {}", output.display()), 2, what);
        assert!(!output.exists(), "{files}");
    }
}

#[test]
fn the_page_is_written_as_a_whole_or_not_at_all() {
    let folder = folder("whole");
    let input = folder.join("a.json");
    fs::write(&input, result(json!([measured("figure", 1.0, 0.1)])).to_string()).unwrap();
    let (input, at) = (input.display(), folder.display());

    // Without `-o`.
    let output =
        Command::new(env!("CARGO_BIN_EXE_slat")).args(["report", "a.json"]).current_dir(&folder).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let page = fs::read_to_string(folder.join("report.html")).unwrap();

    // An old page stays as it is, and no temporary file remains.
    let nr_files = || fs::read_dir(&folder).unwrap().count();
    assert_eq!(nr_files(), 2);
    assert_refused(&format!("report {at}/missing.json -o {at}/report.html"), 2, "missing.json");
    assert_eq!(fs::read_to_string(folder.join("report.html")).unwrap(), page);
    assert_refused(&format!("report {input} -o {input}"), 2, "is a result to read");
    assert_refused(&format!("report {input} -o {at}"), 3, "cannot write");
    assert_refused(&format!("report {input} -o {at}/no/page.html"), 3, "cannot write");
    assert_refused(&format!("report {input} -o /proc/page.html"), 3, "cannot write");
    assert_refused(&format!("report {input} -o /dev/full"), 3, "cannot write");
    assert_eq!(nr_files(), 2);
    assert_eq!(slat(&format!("report {input} -o /dev/null")).status.code(), Some(0));

    // A link stays a link; permissions stay as they were.
    let target = folder.join("target.html");
    fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink(&target, folder.join("link.html")).unwrap();
    let mut permissions = target.metadata().unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o600);
    fs::set_permissions(&target, permissions).unwrap();
    let permissions = target.metadata().unwrap().permissions();
    assert_ok(&format!("report {input} -o {at}/link.html"));
    assert!(folder.join("link.html").is_symlink());
    assert!(fs::read_to_string(&target).unwrap().starts_with("<!DOCTYPE"));
    assert_eq!(target.metadata().unwrap().permissions(), permissions);
}

#[test]
fn a_phase_has_one_color_in_all_plots_and_sections_are_listed() {
    let sample = |name: &str| -> Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/{name}.json"));
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    };
    let html = page("colors", &[sample("parallel_faults")]);
    // The color in the key before a name in a legend.
    let colors: Vec<&str> = html
        .match_indices("<span>Dirty memory</span>")
        .map(|(place, _)| html[..place].rsplit_once("fill=\"").unwrap().1)
        .map(|rest| rest.split('"').next().unwrap())
        .collect();
    assert!(colors.len() >= 2 && colors.iter().all(|color| *color == colors[0]), "{colors:?}");
    assert!(!html.contains("<nav"), "there is one section");
    let html = page("contents", &[sample("parallel_faults"), sample("userfault")]);
    let nr_links = html.matches("<a href=\"#").count();
    assert!(nr_links >= 2, "{html}");
    for (place, _) in html.match_indices("<a href=\"#") {
        let anchor = html[place + "<a href=\"#".len()..].split('"').next().unwrap();
        assert!(html.contains(&format!("<section id=\"{anchor}\"")), "{anchor}");
    }
}
