//! `slat get-dirty-log`: the cost of one call that gets the dirty log of a memslot, for the engine,
//! for KVM's ways around the year 2012, and for the KVM of this machine.
//!
//! - `--workload table`: one memslot with N dirty pages; nanoseconds for one call that fills the
//!   whole bitmap.
//! - `--workload framebuffer`: a small memslot, written in bursts as a screen is, and a call after
//!   each burst.
//! - `--workload migration`: a guest writes at a fixed rate on another thread, while the log is got
//!   again and again. It shows what each of the engine's two ways costs the caller and the guest.
//!
//! Methods are interleaved run by run, on the same pages of the same memory, in an order that is
//! drawn anew for each run. Every log is compared with the pages that were written.

mod kvm;
mod measure;
mod migration;
mod pattern;
mod peer;
mod report;
mod subject;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use slat::Gfn;
use slat_machine::memory::{Backing, BackingKind};
use slat_machine::walk::HardwareFormat;

use crate::args::{FormatArg, PeerArg, check_shadow_format, positive, size_bytes, with_format};
use crate::failure::Failure;
use crate::kvm::{KvmFacts, MAX_REGION_BYTES};
use crate::results::{NotRun, Outcome};
use crate::session::Session;
use kvm::KvmPeer;
use measure::{Bench, Cell};
use pattern::DirtyPattern;
use peer::Peer;
use subject::{Slat, Subject};

/// The options of `slat get-dirty-log`.
#[derive(Clone, Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example: slat get-dirty-log -n 1,64,4096 -p random --runs 20",
    after_long_help = "Methods: srcu-copy copies the set of slots with the other half of the log, and waits for a grace period; \
                       xchg exchanges each word with zero, and visits its bits by mask, by a search for the next, or from \
                       the first to the last; xchg16 exchanges two words at a time; slat is the engine with its default, \
                       lazy protection, slat-leaf the engine with protection leaf by leaf; kvm is this machine's KVM \
                       (--peer).\n\n\
                       Example: slat get-dirty-log -n 1,64,4096 -p random --runs 20"
)]
pub(crate) struct GetDirtyLogArgs {
    /// Size of the slot [default: 1G; framebuffer: 8M].
    ///
    /// In bytes, with an optional suffix K, M, G or T.
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = slot_bytes)]
    pub(crate) bytes: Option<u64>,
    /// Workload.
    ///
    /// What is dirtied, and how.
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = Workload::Table)]
    pub(crate) workload: Workload,
    /// Dirty pages [default: powers of two up to all].
    ///
    /// For the table.
    #[arg(short = 'n', long, value_delimiter = ',', value_name = "N,...", value_parser = positive::<u32>)]
    pub(crate) pages: Option<Vec<u32>>,
    /// Placement of dirty pages.
    ///
    /// In the slot, for the table; by default all patterns.
    #[arg(short = 'p', long, value_name = "HOW,...", value_enum, value_delimiter = ',')]
    pub(crate) pattern: Option<Vec<DirtyPattern>>,
    /// Methods.
    ///
    /// To get the log, besides KVM; by default all of the workload.
    #[arg(long, value_name = "HOW,...", value_enum, value_delimiter = ',')]
    pub(crate) method: Option<Vec<Method>>,
    /// KVM of this machine.
    ///
    /// Whether to measure it in the same runs: if it works, always, or never.
    #[arg(long, value_enum, default_value_t = PeerArg::Auto)]
    pub(crate) peer: PeerArg,
    /// Calls of one method in a row, for the table.
    ///
    /// Each follows writes of its guest to the same pages. With 1, a call finds most of its code
    /// and data out of the caches; with more, the caches are warm.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive::<u32>, hide_short_help = true)]
    pub(crate) in_a_row: u32,
    /// Pages a second that a migration's guest writes [default: 100000].
    ///
    /// 0: as many as it can.
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub(crate) rate: Option<u32>,
    /// Kind of memory, e.g. shmem.
    ///
    /// One of anonymous, anonymous_thp, anonymous_hugetlb_2mb, anonymous_hugetlb_1gb, shmem.
    #[arg(short = 's', long, value_name = "KIND", default_value = "anonymous")]
    pub(crate) backing: BackingKind,
    /// Format of the second-stage tables.
    ///
    /// Of the engine and of its peers in software. Where directory entries have no W (`stage2`,
    /// `gstage`) `slat` is the same as `slat-leaf`.
    #[arg(long, value_enum, default_value_t = FormatArg::Npt)]
    pub(crate) format: FormatArg,
    /// Paging.
    ///
    /// Whether the engine's CPU has a second stage. The CPU of its peers always has one; the real
    /// KVM's as this machine has.
    #[arg(long, value_enum, default_value_t = CpuPagingArg::SecondStage)]
    pub(crate) paging: CpuPagingArg,
    /// Runs at most [default: 500; migration: 100].
    ///
    /// Of each number and pattern (fewer where they take long, but 3); bursts; or harvests of a
    /// migration.
    #[arg(long, value_name = "N", value_parser = positive::<u32>)]
    pub(crate) runs: Option<u32>,
    /// Seed of the random choices.
    #[arg(short = 'r', long, value_name = "N", default_value_t = 1, hide_short_help = true)]
    pub(crate) seed: u64,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl GetDirtyLogArgs {
    /// Size of the slot.
    fn slot_bytes(&self) -> u64 {
        self.bytes.unwrap_or(match self.workload {
            Workload::Table | Workload::Migration => 1 << 30,
            Workload::Framebuffer => 8 << 20,
        })
    }

    /// Pages of the slot.
    fn nr_pages(&self) -> u32 {
        (self.slot_bytes() >> Gfn::SHIFT) as u32
    }

    fn max_runs(&self) -> u32 {
        self.runs.unwrap_or(match self.workload {
            Workload::Table | Workload::Framebuffer => 500,
            Workload::Migration => 100,
        })
    }

    fn patterns(&self) -> &[DirtyPattern] {
        self.pattern.as_deref().unwrap_or(&DirtyPattern::ALL)
    }
}

/// A size of the memslot that the real KVM's guest can have too.
fn slot_bytes(text: &str) -> Result<u64, String> {
    match size_bytes(text)? {
        bytes if bytes > MAX_REGION_BYTES => Err(format!("must be at most {}G", MAX_REGION_BYTES >> 30)),
        bytes => Ok(bytes),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Workload {
    /// N dirty pages of one slot.
    Table,
    /// Bursts of updates of a small slot.
    Framebuffer,
    /// A guest that writes while the log is got.
    Migration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum CpuPagingArg {
    /// The CPU walks the second-stage tables.
    SecondStage,
    /// The CPU has no second stage, and walks shadow tables; the reverse map leads to the leaves of
    /// dirty pages.
    Shadow,
}

impl CpuPagingArg {
    /// The name in options and results.
    fn name(self) -> &'static str {
        match self {
            CpuPagingArg::SecondStage => "second-stage",
            CpuPagingArg::Shadow => "shadow",
        }
    }
}

/// A way to get a dirty log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Method {
    SrcuCopy,
    Xchg,
    XchgFindNext,
    XchgFirstToLast,
    Xchg16,
    Slat,
    SlatLeaf,
    /// Chosen by `--peer`.
    #[value(skip)]
    Kvm,
}

impl Method {
    /// Those that `--method` chooses from.
    const SOFTWARE: [Method; 7] = [
        Method::SrcuCopy,
        Method::Xchg,
        Method::XchgFindNext,
        Method::XchgFirstToLast,
        Method::Xchg16,
        Method::Slat,
        Method::SlatLeaf,
    ];

    /// The name in options and results.
    fn name(self) -> &'static str {
        match self {
            Method::SrcuCopy => "srcu-copy",
            Method::Xchg => "xchg",
            Method::XchgFindNext => "xchg-find-next",
            Method::XchgFirstToLast => "xchg-first-to-last",
            Method::Xchg16 => "xchg16",
            Method::Slat => "slat",
            Method::SlatLeaf => "slat-leaf",
            Method::Kvm => "kvm",
        }
    }

    fn is_engine(self) -> bool {
        matches!(self, Method::Slat | Method::SlatLeaf)
    }
}

/// What was not measured, and why; or what was.
struct Notes {
    /// The facts of the KVM, if it was measured.
    kvm: Option<KvmFacts>,
    not_run: Vec<NotRun>,
}

/// Runs the experiment.
pub(crate) fn run(args: &GetDirtyLogArgs, session: &Session) -> Result<Outcome, Failure> {
    let methods = check_usage(args)?;
    let memory = subject::memory(args.backing, args.slot_bytes())?;
    if args.workload == Workload::Migration {
        return with_format!(args.format, F => match args.paging {
            CpuPagingArg::SecondStage => migration::measure(args, session, &methods, &memory, Slat::<F, _>::new),
            CpuPagingArg::Shadow => migration::measure(args, session, &methods, &memory, Slat::shadow),
        });
    }
    let (subjects, notes) = with_format!(args.format, F => subjects::<F>(args, &methods, &memory))?;
    let mut bench = Bench::new(subjects, memory);
    let outcome = |cells: &[Cell]| {
        Outcome::new(&report::results(args, &notes, cells), |out| report::print(out, args, &notes, cells))
    };
    bench.populate(session)?;
    match args.workload {
        Workload::Framebuffer => measure::framebuffer(args, session, &mut bench, outcome),
        _ => measure::table(args, session, &mut bench, outcome),
    }
}

/// The methods to measure, without KVM.
fn check_usage(args: &GetDirtyLogArgs) -> Result<Vec<Method>, Failure> {
    let usage = |what: String| Err(Failure::Usage(what));
    if args.paging == CpuPagingArg::Shadow {
        check_shadow_format(args.format)?;
    }
    if args.workload != Workload::Table && (args.pages.is_some() || args.pattern.is_some()) {
        return usage("--pages and --pattern are for the table; leave them out".to_owned());
    }
    if args.workload != Workload::Migration && args.rate.is_some() {
        return usage("--rate is for the migration; leave it out".to_owned());
    }
    if args.workload == Workload::Migration && args.peer == PeerArg::Kvm {
        return usage(
            "the migration compares the engine's two ways: there is no peer; leave --peer kvm out".to_owned(),
        );
    }
    let nr_pages = args.nr_pages();
    if let Some(pages) = args.pages.iter().flatten().find(|&&pages| pages > nr_pages) {
        return usage(format!(
            "{pages} dirty pages of a slot that has {nr_pages}; choose fewer, or a larger slot (-b)"
        ));
    }
    let of_workload = |method: Method| args.workload != Workload::Migration || method.is_engine();
    let Some(chosen) = &args.method else {
        return Ok(Method::SOFTWARE.into_iter().filter(|&method| of_workload(method)).collect());
    };
    if let Some(method) = chosen.iter().find(|&&method| !of_workload(method)) {
        return usage(format!(
            "the migration compares the engine's two ways: there is no {}; choose slat or slat-leaf",
            method.name()
        ));
    }
    if chosen.contains(&Method::Xchg16) && !peer::has_exchange16() {
        return Err(Failure::CannotServe(
            "its CPUs have no exchange of 16 bytes, for xchg16; choose another --method".to_owned(),
        ));
    }
    // In the order of the columns, each once.
    Ok(Method::SOFTWARE.into_iter().filter(|method| chosen.contains(method)).collect())
}

type Subjects = Vec<(Method, Box<dyn Subject>)>;

/// All that are measured.
fn subjects<F: HardwareFormat>(
    args: &GetDirtyLogArgs,
    methods: &[Method],
    memory: &Backing,
) -> Result<(Subjects, Notes), Failure> {
    let mut subjects: Subjects = Vec::new();
    let mut notes = Notes { kvm: None, not_run: Vec::new() };
    for &method in methods {
        let subject: Box<dyn Subject> = match method {
            Method::Slat | Method::SlatLeaf => match args.paging {
                CpuPagingArg::SecondStage => Box::new(Slat::<F, _>::new(method, memory)?),
                CpuPagingArg::Shadow => Box::new(Slat::shadow(method, memory)?),
            },
            Method::Xchg16 if !peer::has_exchange16() => {
                let why = "the CPUs have no exchange of 16 bytes".to_owned();
                notes.not_run.push(NotRun { what: "xchg16".to_owned(), why });
                continue;
            }
            _ => Box::new(Peer::<F>::new(method, memory)),
        };
        subjects.push((method, subject));
    }
    if args.peer != PeerArg::None {
        match working_kvm(memory) {
            Ok((kvm, facts)) => {
                subjects.push((Method::Kvm, Box::new(kvm)));
                notes.kvm = Some(facts);
            }
            Err(why) if args.peer == PeerArg::Kvm => {
                return Err(Failure::CannotServe(format!(
                    "there is no KVM to measure: {why}; leave --peer kvm out, or get access to /dev/kvm"
                )));
            }
            Err(why) => notes.not_run.push(NotRun { what: "KVM of this machine".to_owned(), why }),
        }
    }
    Ok((subjects, notes))
}

/// A KVM whose guest has written a page, and whose log was got.
fn working_kvm(memory: &Backing) -> Result<(KvmPeer, KvmFacts), String> {
    let kvm = KvmPeer::new(memory).and_then(|kvm| Ok((kvm, crate::kvm::facts()?)));
    let (mut kvm, facts) = kvm.map_err(|error| error.to_string())?;
    let mut log = vec![0; pattern::nr_words((memory.size_bytes() >> Gfn::SHIFT) as u32)];
    // This call clears the page's bit too: later calls begin with a clean log.
    kvm.write(&[0], 1).and_then(|()| kvm.get_dirty_log(&mut log)).map_err(|failure| failure.to_string())?;
    Ok((kvm, facts))
}
