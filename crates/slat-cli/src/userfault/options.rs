//! The options of `slat userfault`, and the cases that they name.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use slat::PageSize;
use slat_machine::memory::BackingKind;
use slat_machine::paging::{ParseSourceError, SourceSpec};
use slat_machine::vm::demand_paging::PagedBacking;

use super::case::{Case, Mode, Uffds};
use super::published::{self, Group};
use super::source::contents;
use crate::failure::{Failure, refuse};
use crate::options::{CONTENTS, CPUS, FORMAT, FormatArg, OVERLAP, OutputArgs, delay, page_size, positive, size_bytes};

/// The longest delay of a page.
const MAX_DELAY: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example: slat userfault\nExample: slat userfault -v 8 -b 16M --uffd missing --exits",
    after_long_help = "Without an option that names a case (--uffd, --exits, --delivery, --backing and others), the modes of the \
                       first published table run, in turns, beside the published figures.\n\n\
                       Example: slat userfault\n\
                       Example: slat userfault -v 8 -b 16M --uffd missing --exits\n\
                       Example: slat userfault --matrix --vcpus 2,8 -b 1M --modes none,missing,uf"
)]
pub(crate) struct UserfaultArgs {
    /// Number of vCPUs [default: 2,8; one case 4; --matrix 2,8,64]
    ///
    /// Several numbers run one after the other.
    #[arg(short, long, value_delimiter = ',', value_parser = positive::<usize>, value_name = "N,...")]
    pub(crate) vcpus: Option<Vec<usize>>,
    /// Memory for each vCPU, e.g. 64M [default: 4M; one case, --matrix 64M]
    ///
    /// By default less where not so much fits.
    #[arg(short, long, value_name = "SIZE", value_parser = size_bytes)]
    pub(crate) bytes: Option<u64>,
    /// Kind of memory, e.g. shmem
    ///
    /// One of anonymous, anonymous_thp, anonymous_hugetlb_2mb, anonymous_hugetlb_1gb, shmem,
    /// guest_memfd.
    #[arg(short = 's', long, value_name = "KIND")]
    backing: Option<PagedBacking>,
    /// Whether a memory file may replace `-s guest_memfd` where /dev/kvm has none
    #[arg(long, value_name = "WHICH", value_enum, default_value_t = GuestMemfdArg::Any, hide_short_help = true)]
    pub(crate) guest_memfd: GuestMemfdArg,
    #[arg(short, long, help = OVERLAP, hide_short_help = true)]
    pub(crate) overlap: bool,
    /// Bring pages by userfaultfd
    ///
    /// Missing pages are copied; minor ones are present in the file and get mapped, which needs
    /// shared memory.
    #[arg(long, value_name = "MODE", value_enum, ignore_case = true)]
    pub(crate) uffd: Option<UffdArg>,
    /// One userfaultfd descriptor for all memory, not one for each vCPU
    ///
    /// `--overlap` implies it.
    #[arg(long, hide_short_help = true)]
    single_uffd: bool,
    /// Threads that read each descriptor [default: 1]
    #[arg(long, value_name = "N", value_parser = positive::<usize>, hide_short_help = true)]
    readers: Option<usize>,
    /// Bring pages by userfault exits
    ///
    /// With --uffd, exits serve the accesses of vCPUs, and userfaultfd those of the process.
    #[arg(long)]
    exits: bool,
    /// Delivery of requests: by an exit, or through rings
    ///
    /// The vCPU's own thread serves an exit; a resolver serves rings in shared memory (needs
    /// --exits and memory that is shared).
    #[arg(long, value_name = "HOW", value_enum, default_value_t = DeliveryArg::Exit)]
    pub(crate) delivery: DeliveryArg,
    /// Where the resolver of `--delivery ring` runs
    #[arg(long, value_name = "WHERE", value_enum, default_value_t = ResolverArg::Process, hide_short_help = true)]
    pub(crate) resolver: ResolverArg,
    /// Kill the resolver process so many times, and start another
    ///
    /// Each at a random moment.
    #[arg(long, default_value_t = 0, value_name = "N", hide_short_help = true)]
    pub(crate) kill_resolver: u32,
    /// Delay of each page, e.g. 50us
    ///
    /// The delays of several pages overlap.
    #[arg(long, default_value = "0s", value_name = "TIME", value_parser = page_delay, hide_short_help = true)]
    pub(crate) delay: Duration,
    /// Memory of one bit of the userfault bitmap, and of one fill: 4K, 2M or 1G [default: 4K]
    #[arg(long, value_name = "SIZE", value_parser = page_size, hide_short_help = true)]
    granularity: Option<PageSize>,
    /// Source of pages, e.g. file:PATH
    ///
    /// `pattern` or `constant:BYTE` is generated; `file:PATH`; a peer behind a socket, `unix:PATH`
    /// or `tcp:127.0.0.1:PORT` (see `slat serve-pages`). With `unix` or `tcp` alone, the command
    /// itself is the peer.
    #[arg(long, default_value = "pattern", value_parser = source, value_name = "SOURCE", hide_short_help = true)]
    pub(crate) source: SourceArg,
    /// Contents of the pages: pattern:SEED or constant:BYTE
    ///
    /// Of a file or a peer. All that arrives is verified against it.
    #[arg(long, default_value = "pattern", value_parser = contents, value_name = "CONTENTS", help = CONTENTS, hide_short_help = true)]
    pub(crate) contents: SourceSpec,
    /// Write this file first, with enough pages of `--contents` for `--source file:PATH`
    ///
    /// It must not exist yet.
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    pub(crate) create_source: Option<PathBuf>,
    /// Bring pages without a request in the background
    ///
    /// Requests of vCPUs have priority.
    #[arg(long, hide_short_help = true)]
    pub(crate) copier: bool,
    /// Log dirty pages while paging, and hold the log against memory
    #[arg(long, hide_short_help = true)]
    pub(crate) log_dirty: bool,
    /// Run the rows of all published tables
    ///
    /// Of x86, or with `--format stage2` of arm64.
    #[arg(long)]
    pub(crate) matrix: bool,
    /// Of the published rows, only these modes
    ///
    /// Of none, missing, missing-1r, missing+uf, minor, minor-1r, minor+uf, uf, uf-ring.
    #[arg(long, value_delimiter = ',', value_enum, hide_possible_values = true, value_name = "MODE,...")]
    modes: Option<Vec<Mode>>,
    /// Host threads that run the vCPUs [default: the runner's choice]
    ///
    /// In turns when they are fewer.
    #[arg(long, value_parser = positive::<usize>, value_name = "N", hide_short_help = true)]
    pub(crate) threads: Option<usize>,
    #[arg(long, value_delimiter = ',', value_name = "CPU,...", help = CPUS, hide_short_help = true)]
    pub(crate) cpus: Option<Vec<u32>>,
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = FormatArg::Npt, help = FORMAT)]
    pub(crate) format: FormatArg,
    /// Runs of each measurement [default: 3; one case 1]
    ///
    /// Those of different rows take turns.
    #[arg(long, value_parser = positive::<u32>, value_name = "N")]
    runs: Option<u32>,
    /// Seed of the random choices
    ///
    /// Of the moments at which the resolver is killed.
    #[arg(long, value_name = "N", default_value_t = 1, hide_short_help = true)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// What is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rows {
    /// The case that the options name.
    One,
    /// The first published table.
    Table,
    /// All published tables.
    Matrix,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum UffdArg {
    Missing,
    Minor,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum DeliveryArg {
    Exit,
    Ring,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ResolverArg {
    /// In a thread of this process.
    Thread,
    /// In another process.
    Process,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum GuestMemfdArg {
    Any,
    /// Only a real one.
    Kvm,
}

/// Where contents come from.
#[derive(Clone, Debug)]
pub(crate) enum SourceArg {
    /// An existing or a generated source.
    Given(SourceSpec),
    /// The command itself is the peer, at a new path.
    OwnUnix,
    /// The command itself is the peer, on loopback.
    OwnTcp,
}

impl SourceArg {
    /// As it is written in options.
    pub(super) fn name(&self) -> String {
        match self {
            SourceArg::Given(spec) => spec.to_string(),
            SourceArg::OwnUnix => "unix".to_owned(),
            SourceArg::OwnTcp => "tcp".to_owned(),
        }
    }
}

fn source(text: &str) -> Result<SourceArg, String> {
    match text {
        "unix" => Ok(SourceArg::OwnUnix),
        "tcp" => Ok(SourceArg::OwnTcp),
        _ => text.parse().map(SourceArg::Given).map_err(|error: ParseSourceError| error.to_string()),
    }
}

fn page_delay(text: &str) -> Result<Duration, String> {
    match delay(text)? {
        delay if delay > MAX_DELAY => Err("must be at most 5s".to_owned()),
        delay => Ok(delay),
    }
}

impl UserfaultArgs {
    fn rows(&self) -> Rows {
        let names_a_case = self.uffd.is_some()
            || self.exits
            || self.readers.is_some()
            || self.backing.is_some()
            || self.granularity.is_some()
            || self.single_uffd
            || self.overlap
            || self.delivery == DeliveryArg::Ring
            || self.guest_memfd == GuestMemfdArg::Kvm;
        match (self.matrix, names_a_case) {
            (_, true) => Rows::One,
            (true, false) => Rows::Matrix,
            (false, false) => Rows::Table,
        }
    }

    pub(super) fn nr_vcpus(&self) -> &[usize] {
        match (&self.vcpus, self.rows()) {
            (Some(vcpus), _) => vcpus,
            (None, Rows::One) => &[4],
            (None, Rows::Table) => &published::VCPUS[..2],
            (None, Rows::Matrix) => &published::VCPUS,
        }
    }

    /// Memory for each vCPU if nothing else is said: as in the published tables, or less, which the
    /// rates hardly depend on.
    pub(super) fn default_bytes(&self) -> u64 {
        if self.rows() == Rows::Table { 4 << 20 } else { 64 << 20 }
    }

    pub(super) fn nr_runs(&self) -> u32 {
        self.runs.unwrap_or(if self.rows() == Rows::One { 1 } else { 3 })
    }

    /// The kind of memory of the case that the options name.
    fn backing(&self) -> PagedBacking {
        self.backing.unwrap_or(PagedBacking::Memory(BackingKind::Anonymous))
    }

    /// Memory of one bit of the userfault bitmap.
    pub(super) fn granularity(&self) -> PageSize {
        self.granularity.unwrap_or(PageSize::Size4K)
    }

    /// Whether the rows are those of the published tables.
    pub(super) fn are_rows_published(&self) -> bool {
        self.rows() != Rows::One
    }

    /// The published tables whose rows are run.
    pub(super) fn groups(&self) -> &'static [Group] {
        let all: &[Group] = if self.format.name() == "stage2" { &published::ARM64 } else { &published::X86 };
        if self.rows() == Rows::Table { &all[..1] } else { all }
    }

    /// Whether the published figures are of this format's architecture.
    pub(super) fn published_on(&self) -> Option<&'static str> {
        match self.format.name() {
            "npt" | "ept" => Some("x86"),
            "stage2" => Some("arm64"),
            _ => None,
        }
    }

    /// Refuses combinations of options that exclude each other.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let (rows, is_ring) = (self.rows(), self.delivery == DeliveryArg::Ring);
        let has_process = is_ring && self.resolver == ResolverArg::Process;
        let backing = self.backing();
        refuse([
            (
                self.cpus.is_some() && self.nr_vcpus().len() != 1,
                "--cpus has a CPU for each vCPU: choose one number of vCPUs",
            ),
            (
                self.cpus.is_some() && self.threads.is_some(),
                "--cpus and --threads: a vCPU that is pinned has its own thread; choose one",
            ),
            (
                self.kill_resolver > 0 && !has_process,
                "--kill-resolver needs --delivery ring with --resolver process; add them",
            ),
            (
                self.kill_resolver > 0 && self.log_dirty,
                "--kill-resolver and --log-dirty: rounds that are logged are not interrupted; choose one",
            ),
            (
                self.matrix && rows == Rows::One,
                "--matrix runs the rows of the published tables, and other options name one case; choose one",
            ),
            (
                self.modes.is_some() && rows == Rows::One,
                "--modes chooses rows of the published tables, and other options name one case; choose one",
            ),
            (
                rows == Rows::Table && self.cases(1, 1).is_empty(),
                "--modes: the first published table has none of these rows; add --matrix",
            ),
            (
                self.readers.is_some() && self.uffd.is_none(),
                "--readers: there is no descriptor to read without --uffd; add it",
            ),
            (is_ring && !self.exits, "--delivery ring delivers userfault requests: it needs --exits; add it"),
            (
                is_ring && self.uffd.is_some(),
                "--delivery ring and --uffd: the resolver of the rings does not read userfaultfd; choose one",
            ),
            (is_ring && !self.is_shared(), "--delivery ring needs memory that the resolver can map; choose -s shmem"),
            (
                self.uffd == Some(UffdArg::Minor) && !self.is_shared(),
                &format!(
                    "--uffd minor needs memory that is present and not mapped, so shared memory (-s shmem); {backing} is private"
                ),
            ),
        ])
    }

    /// Whether the memory can have a second mapping.
    fn is_shared(&self) -> bool {
        self.backing() == PagedBacking::Memory(BackingKind::Shmem)
    }

    /// The mode that the options name; not with rows of tables.
    fn mode(&self) -> Mode {
        let is_one_reader = self.uffds() == Uffds::One && self.readers.unwrap_or(1) == 1;
        match (self.uffd, self.exits) {
            (None, false) => Mode::None,
            (None, true) if self.delivery == DeliveryArg::Ring => Mode::Ring,
            (None, true) => Mode::Exits,
            (Some(UffdArg::Missing), true) => Mode::MissingAndExits,
            (Some(UffdArg::Minor), true) => Mode::MinorAndExits,
            (Some(UffdArg::Missing), false) if is_one_reader => Mode::MissingOneReader,
            (Some(UffdArg::Missing), false) => Mode::Missing,
            (Some(UffdArg::Minor), false) if is_one_reader => Mode::MinorOneReader,
            (Some(UffdArg::Minor), false) => Mode::Minor,
        }
    }

    fn uffds(&self) -> Uffds {
        // With overlapping accesses a vCPU has no part of the memory.
        if self.single_uffd || self.overlap { Uffds::One } else { Uffds::PerVcpu }
    }

    /// The cases for `nr_vcpus`, in the order of the tables.
    pub(super) fn cases(&self, nr_vcpus: usize, bytes_per_vcpu: u64) -> Vec<Case> {
        if self.rows() == Rows::One {
            let nr_readers = self.readers.unwrap_or(1);
            let (mode, backing, uffds) = (self.mode(), self.backing(), self.uffds());
            return vec![Case { mode, nr_vcpus, bytes_per_vcpu, backing, uffds, nr_readers }];
        }
        let is_wanted = |mode: Mode| self.modes.as_ref().is_none_or(|modes| modes.contains(&mode));
        let case = |group: &Group, mode: Mode| {
            // One reader or as many as vCPUs; with a descriptor for each vCPU, one for each of
            // these.
            let many = if group.uffds == Uffds::One { nr_vcpus } else { 1 };
            let nr_readers = if matches!(mode, Mode::Missing | Mode::Minor) { many } else { 1 };
            Case { mode, nr_vcpus, bytes_per_vcpu, backing: group.backing, uffds: group.uffds, nr_readers }
        };
        let rows = self.groups().iter().flat_map(|group| group.rows.iter().map(move |row| (group, row.mode)));
        rows.filter(|&(_, mode)| is_wanted(mode)).map(|(group, mode)| case(group, mode)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{self, ValueName};

    fn parse(line: &str) -> UserfaultArgs {
        options::parse(&format!("slat userfault {line}")).unwrap()
    }

    /// The mode, the descriptors and the readers of the one case.
    fn the_case(line: &str) -> (String, String, usize) {
        let args = parse(line);
        args.check().unwrap();
        let [case] = args.cases(8, 4096)[..] else { panic!("{line}: not one case") };
        (case.mode.name(), case.uffds.name(), case.nr_readers)
    }

    #[test]
    fn options_name_a_mode() {
        for (line, expected) in [
            ("-s anonymous", ("none", "per-vcpu", 1)),
            ("--single-uffd", ("none", "one", 1)),
            ("--uffd MISSING", ("missing", "per-vcpu", 1)),
            ("--uffd missing --single-uffd", ("missing-1r", "one", 1)),
            ("--uffd missing -o", ("missing-1r", "one", 1)),
            ("--uffd missing --single-uffd --readers 8", ("missing", "one", 8)),
            ("--uffd missing --single-uffd --exits", ("missing+uf", "one", 1)),
            ("--uffd minor -s shmem", ("minor", "per-vcpu", 1)),
            ("--uffd minor -s shmem --single-uffd", ("minor-1r", "one", 1)),
            ("--uffd minor -s shmem --exits --readers 3", ("minor+uf", "per-vcpu", 3)),
            ("--exits", ("uf", "per-vcpu", 1)),
            ("--exits --single-uffd -s shmem --delivery ring", ("uf-ring", "one", 1)),
        ] {
            let (mode, uffds, nr_readers) = the_case(line);
            assert_eq!((&mode[..], &uffds[..], nr_readers), expected, "{line}");
        }
    }

    #[test]
    fn the_matrix_has_the_rows_of_the_published_tables() {
        let args = parse("--matrix");
        assert_eq!((args.nr_vcpus(), args.nr_runs()), (&[2, 8, 64][..], 3));
        let cases = args.cases(64, 4096);
        assert_eq!(cases.len(), 5 + 6 + 5);
        let readers = |mode: Mode, uffds: Uffds| {
            cases.iter().find(|case| case.mode == mode && case.uffds == uffds).unwrap().nr_readers
        };
        assert_eq!(readers(Mode::MissingOneReader, Uffds::One), 1);
        assert_eq!(readers(Mode::Missing, Uffds::One), 64);
        assert_eq!(readers(Mode::Minor, Uffds::One), 64);
        assert_eq!(readers(Mode::Minor, Uffds::PerVcpu), 1);
        let args = parse("--matrix --vcpus 256,400 --modes none,uf --runs 5");
        assert_eq!((args.nr_vcpus(), args.nr_runs()), (&[256, 400][..], 5));
        assert_eq!(args.cases(256, 4096).len(), 6);
        assert_eq!((args.published_on(), parse("--format ept").published_on()), (Some("x86"), Some("x86")));
    }

    #[test]
    fn without_a_case_the_first_published_table_runs() {
        let args = parse("");
        args.check().unwrap();
        assert_eq!((args.nr_vcpus(), args.nr_runs(), args.cases(8, 4096).len()), (&[2, 8][..], 3, 5));
        assert!(parse("--modes minor").check().is_err());
        assert_eq!(parse("--format stage2 --modes uf-ring").cases(2, 4096).len(), 1);
    }

    #[test]
    fn sources_are_named_and_found_again() {
        for text in ["pattern:0", "file:/a:b", "unix", "unix:/run/peer", "tcp", "tcp:127.0.0.1:7000"] {
            assert_eq!(source(text).unwrap().name(), text);
        }
        for bad in ["", "patterns", "file", "unix:", "tcp:", "tcp:here", "http://x"] {
            assert!(source(bad).is_err(), "{bad}");
        }
    }
}
