//! The lines of the hypervisor, on its debug console:
//! - `say TEXT`: for people;
//! - `progress DONE TOTAL TEXT`;
//! - `figure NAME VALUE UNIT`, in base units; a name that comes again has one more sample;
//! - `ready TEXT`: another machine may start, which this one needs;
//! - `tables WORDS`: where page tables are that are to be walked ([`walker`](super::walker));
//! - `verdict pass TEXT`, `verdict fail CHECK TEXT` (a check found something wrong: the name of a
//!   [`Check`]), `verdict error TEXT` (the run could not be made): the last one.
//!
//! Every other line is of the emulator. A CPU that fails while another prints does not wait for it:
//! so these two may come in the middle of a line.

use clap::ValueEnum;

use super::walker::Tables;
use crate::quantity::Unit;

/// A line.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Line {
    Say(String),
    Progress {
        done: u64,
        total: u64,
        text: String,
    },
    Figure {
        name: String,
        value: f64,
        unit: Unit,
    },
    Ready,
    Tables(Tables),
    Verdict(Verdict),
    /// Of the emulator, or one that cannot be understood.
    Other(String),
}

/// How the hypervisor judges the run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// All that was checked was right.
    Pass(String),
    /// A check found something wrong.
    Fail(Check, String),
    /// The run could not be made.
    Error(String),
}

impl Verdict {
    pub(super) fn text(&self) -> &str {
        let (Verdict::Pass(text) | Verdict::Fail(_, text) | Verdict::Error(text)) = self;
        text
    }

    /// The failure with these words.
    fn fail(words: &str) -> Verdict {
        let (name, text) = words.split_once(' ').unwrap_or((words, ""));
        match Check::from_str(name, false) {
            Ok(check) => Verdict::Fail(check, text.to_owned()),
            Err(_) => Verdict::Fail(Check::Other, words.to_owned()),
        }
    }
}

/// The check that found something wrong, by its word in the verdict: `console.rs` of slat-metal has
/// what each is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum Check {
    Access,
    Log,
    EntryFlush,
    LocalFlush,
    BreakFlush,
    Tables,
    Hash,
    Withheld,
    Silence,
    Other,
}

impl Line {
    pub(super) fn parse(line: &str) -> Line {
        let behind = |words| line.split_once(words).map(|(_, text): (_, &str)| text.to_owned());
        let failed = behind("verdict fail ").map(|words| Verdict::fail(&words));
        let ended = failed.or_else(|| behind("verdict error ").map(Verdict::Error)).map(Line::Verdict);
        ended.or_else(|| parse(line)).unwrap_or_else(|| Line::Other(line.to_owned()))
    }
}

fn parse(line: &str) -> Option<Line> {
    let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
    match kind {
        "say" => Some(Line::Say(rest.to_owned())),
        "ready" => Some(Line::Ready),
        "progress" => {
            let mut words = rest.splitn(3, ' ');
            let (done, total) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            Some(Line::Progress { done, total, text: words.next().unwrap_or_default().to_owned() })
        }
        "figure" => {
            let mut words = rest.split(' ');
            let (name, value, unit) = (words.next()?, words.next()?.parse::<f64>().ok()?, words.next()?);
            let is_name = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_';
            let is_figure = !name.is_empty() && name.chars().all(is_name) && value.is_finite();
            (is_figure && words.next().is_none()).then_some(Line::Figure {
                name: name.to_owned(),
                value,
                unit: parse_unit(unit)?,
            })
        }
        "tables" => Tables::parse(rest).map(Line::Tables),
        "verdict" => match rest.split_once(' ').unwrap_or((rest, "")) {
            ("pass", text) => Some(Line::Verdict(Verdict::Pass(text.to_owned()))),
            ("fail", words) => Some(Line::Verdict(Verdict::fail(words))),
            ("error", text) => Some(Line::Verdict(Verdict::Error(text.to_owned()))),
            _ => None,
        },
        _ => None,
    }
}

/// The unit of this name in results; `1` is a count too.
fn parse_unit(name: &str) -> Option<Unit> {
    match name {
        "s" => Some(Unit::Seconds),
        "B" => Some(Unit::Bytes),
        "1/s" => Some(Unit::PerSecond),
        "1" | "count" => Some(Unit::Count),
        "ratio" => Some(Unit::Ratio),
        "instructions" => Some(Unit::Instructions),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_what_they_say() {
        assert_eq!(Line::parse("say 2 CPUs"), Line::Say("2 CPUs".to_owned()));
        assert_eq!(Line::parse("say"), Line::Say(String::new()));
        assert_eq!(Line::parse("ready for the other machine"), Line::Ready);
        let progress = Line::Progress { done: 3, total: 10, text: "by leaf".to_owned() };
        assert_eq!(Line::parse("progress 3 10 by leaf"), progress);
        let figure = Line::Figure { name: "faults".to_owned(), value: 12.0, unit: Unit::Count };
        assert_eq!(Line::parse("figure faults 12 1"), figure);
        let figure = Line::Figure { name: "clear".to_owned(), value: 2.35, unit: Unit::Instructions };
        assert_eq!(Line::parse("figure clear 2.35 instructions"), figure);
        assert_eq!(Line::parse("verdict pass all held"), Line::Verdict(Verdict::Pass("all held".to_owned())));
        assert_eq!(Line::parse("verdict fail"), Line::Verdict(Verdict::Fail(Check::Other, String::new())));
        let error = Line::Verdict(Verdict::Error("too little memory".to_owned()));
        assert_eq!(Line::parse("verdict error too little memory"), error);
        let fail = |check, text: &str| Line::Verdict(Verdict::Fail(check, text.to_owned()));
        assert_eq!(Line::parse("verdict fail page 7"), fail(Check::Other, "page 7"));
        assert_eq!(Line::parse("say 10 opverdict fail log page 7"), fail(Check::Log, "page 7"));
        for (name, check) in [("access", Check::Access), ("entry-flush", Check::EntryFlush), ("other", Check::Other)] {
            assert_eq!(Line::parse(&format!("verdict fail {name} x y")), fail(check, "x y"));
        }
    }

    #[test]
    fn other_lines_are_of_the_emulator() {
        for line in [
            "",
            "qemu-system-x86_64: warning: x",
            "progress 1",
            "progress a b c",
            "figure Faults 1 1",
            "figure  1 1",
            "figure faults NaN 1",
            "figure faults 1 MiB",
            "figure faults 1 1 1",
            "verdict maybe",
            "saying x",
        ] {
            assert_eq!(Line::parse(line), Line::Other(line.to_owned()));
        }
    }
}
