//! `slat dirty-log`: the cost of one call that gets the dirty log of a memslot, for the engine,
//! for KVM's ways around the year 2012, and for the KVM of this machine.
//!
//! - `--workload table`: one memslot with N dirty pages; nanoseconds for one call that fills the
//!   whole bitmap.
//! - `--workload framebuffer`: a small memslot, written in bursts as a screen is, and a call after
//!   each burst.
//! - `--workload migration`: a guest writes at a fixed rate on another thread, while the log is got
//!   again and again. It shows what each method costs the caller and the guest.
//! - `--workload range`: a large memslot, harvested whole and in windows.
//!
//! What was published of the ways of 2012 stands beside them (`published`), and decides nothing.
//!
//! Other vCPUs run guest code meanwhile: a flush must reach them, and the old way's grace period
//! waits for them. After the call the guest writes the same pages again, timed: a call may leave
//! work to the next writers.
//!
//! Methods are interleaved run by run, on the same pages of the same memory, in an order that is
//! drawn anew for each run. Every log is compared with the pages that were written.

mod bench;
mod figures;
mod kvm;
mod migration;
mod pattern;
mod peer;
mod published;
mod range;
mod run;
mod running;
mod subject;

use clap::{Args, ValueEnum, value_parser};
use slat::Gfn;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::linux::topology::HostDescription;
use slat_machine::memory::{Backing, BackingKind};

use crate::failure::{Failure, ensure, refuse};
use crate::kvm::{KvmFacts, MAX_REGION_BYTES};
use crate::options::{
    FormatArg, OutputArgs, PEER, PagingArg, PeerArg, SEED, check_shadow_format, except, positive, size_bytes,
    with_format,
};
use crate::results::{NotRun, Outcome};
use crate::session::Session;
use bench::{Bench, Cell};
use pattern::DirtyPattern;
pub(crate) use pattern::compare_log;
pub(crate) use published::{Row as PublishedRow, TABLE as PUBLISHED_TABLE};
use subject::Subject;

/// What one word of the bitmap covers.
const WINDOW_UNIT: u64 = 64 << Gfn::SHIFT;

/// vCPUs beside a call, at most: each is a thread of each method.
const MAX_RUNNING: i64 = 64;

#[derive(Clone, Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example: slat dirty-log --pages 1,64,4096 --pattern random --runs 20",
    after_long_help = "Methods: srcu-copy copies the set of slots with the other half of the log, and waits for a grace period; \
                       xchg exchanges each word with zero; xchg16 exchanges two words at a time; slat is the engine with its default, \
                       lazy protection, slat-leaf the engine with protection leaf by leaf; kvm is this machine's KVM \
                       (--peer).\n\n\
                       Example: slat dirty-log --pages 1,64,4096 --pattern random --runs 20"
)]
pub(crate) struct DirtyLogArgs {
    /// Memory for each vCPU, e.g. 64M [default: 1G; framebuffer: 8M; range: 8G]
    ///
    /// There is one vCPU, and one slot.
    #[arg(short, long, value_name = "SIZE", value_parser = slot_bytes)]
    pub(crate) bytes: Option<u64>,
    /// What is dirtied, and how
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = Workload::Table)]
    pub(crate) workload: Workload,
    /// Dirty pages of the table or the range [default: powers of two up to all]
    ///
    /// The range has one page of 512 and one of 8 by default.
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = positive::<u32>)]
    pub(crate) pages: Option<Vec<u32>>,
    /// Placement of these dirty pages [default: all]
    #[arg(long, value_name = "HOW,...", value_enum, value_delimiter = ',')]
    pub(crate) pattern: Option<Vec<DirtyPattern>>,
    /// Ways to get the log, besides KVM [default: all of the workload]
    #[arg(long, value_name = "HOW,...", value_delimiter = ',', value_parser = except(&Method::Kvm), hide_short_help = true)]
    pub(crate) method: Option<Vec<Method>>,
    #[arg(long, value_name = "PEER", value_enum, default_value_t = PeerArg::Auto, help = PEER)]
    pub(crate) peer: PeerArg,
    /// Calls of one method in a row, for the table
    ///
    /// Each follows writes of its guest to the same pages. With 1, a call finds most of its code
    /// and data out of the caches; with more, the caches are warm.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive::<u32>, hide_short_help = true)]
    pub(crate) in_a_row: u32,
    /// Pages a second that a migration's guest writes [default: 100000]
    ///
    /// 0: as many as it can.
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub(crate) rate: Option<u32>,
    /// Kind of memory, e.g. shmem
    ///
    /// One of anonymous, anonymous_thp, anonymous_hugetlb_2mb, anonymous_hugetlb_1gb, shmem.
    #[arg(short = 's', long, value_name = "KIND", default_value = "anonymous")]
    pub(crate) backing: BackingKind,
    /// Format of the second-stage tables
    ///
    /// Of the engine and of its peers in software. Where directory entries have no W (`stage2`,
    /// `gstage`) `slat` is the same as `slat-leaf`.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = FormatArg::Npt)]
    pub(crate) format: FormatArg,
    /// Page tables of the guest and of the hardware
    ///
    /// Of the engine's CPU. The CPU of its peers is always flat; the real KVM's is as this machine
    /// has it.
    #[arg(long, value_name = "PAGING", default_value = "flat", value_parser = except(&PagingArg::TwoDimensional), hide_short_help = true)]
    pub(crate) paging: PagingArg,
    /// Runs of each measurement [default: at most 500; migration: 100; range: 50]
    ///
    /// Of each number and pattern (fewer where they take long, but 5, of KVM 3); bursts; or
    /// harvests of a migration.
    #[arg(long, value_name = "N", value_parser = positive::<u32>)]
    pub(crate) runs: Option<u32>,
    #[arg(long, value_name = "N", default_value_t = 1, help = SEED, hide_short_help = true)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// vCPUs that run beside each call [default: 1; migration: 0]
    ///
    /// They run guest code that only reads, in each method's VM. The guest of a migration runs in
    /// any case. With 0, no vCPU of the other workloads runs while the log is got.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(..=MAX_RUNNING), hide_short_help = true)]
    running_vcpus: Option<u16>,
    /// Windows of the range [default: 16M,256M,1G]
    ///
    /// Sizes of the windows in which the engine gets the log: multiples of 256K.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = window_bytes, hide_short_help = true)]
    window: Option<Vec<u64>>,
}

impl DirtyLogArgs {
    fn slot_bytes(&self) -> u64 {
        self.bytes.unwrap_or(match self.workload {
            Workload::Table | Workload::Migration => 1 << 30,
            Workload::Framebuffer => 8 << 20,
            Workload::Range => 8 << 30,
        })
    }

    fn nr_pages(&self) -> u32 {
        (self.slot_bytes() >> Gfn::SHIFT) as u32
    }

    fn max_runs(&self) -> u32 {
        self.runs.unwrap_or(match self.workload {
            Workload::Table | Workload::Framebuffer => 500,
            Workload::Range => 50,
            Workload::Migration => 100,
        })
    }

    fn patterns(&self) -> &[DirtyPattern] {
        self.pattern.as_deref().unwrap_or(match self.workload {
            Workload::Range => &[DirtyPattern::Run, DirtyPattern::Random],
            _ => DirtyPattern::value_variants(),
        })
    }

    fn running_vcpus(&self) -> u16 {
        self.running_vcpus.unwrap_or(match self.workload {
            Workload::Table | Workload::Framebuffer | Workload::Range => 1,
            Workload::Migration => 0,
        })
    }

    /// Sizes of the windows of the range, in pages.
    fn windows(&self) -> Vec<u32> {
        let bytes = self.window.clone().unwrap_or_else(|| vec![16 << 20, 256 << 20, 1 << 30]);
        bytes.iter().map(|bytes| (bytes >> Gfn::SHIFT) as u32).collect()
    }

    /// Numbers of dirty pages of the range: sparse and dense.
    fn range_pages(&self) -> Vec<u32> {
        self.pages.clone().unwrap_or_else(|| [512, 8].map(|part| (self.nr_pages() / part).max(1)).to_vec())
    }
}

/// A size of the memslot that the real KVM's guest can have too.
fn slot_bytes(text: &str) -> Result<u64, String> {
    match size_bytes(text)? {
        bytes if bytes > MAX_REGION_BYTES => Err(format!("must be at most {}G", MAX_REGION_BYTES >> 30)),
        bytes => Ok(bytes),
    }
}

/// A size that a window may have: whole words of the bitmap.
fn window_bytes(text: &str) -> Result<u64, String> {
    match slot_bytes(text)? {
        bytes if !bytes.is_multiple_of(WINDOW_UNIT) => Err("must be a multiple of 256K".to_owned()),
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
    /// A large slot, whole and in windows.
    Range,
}

/// A way to get a dirty log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Method {
    SrcuCopy,
    Xchg,
    Xchg16,
    Slat,
    SlatLeaf,
    /// Chosen by `--peer`.
    Kvm,
}

impl Method {
    /// Those that differ in how a call works, and not only in the size of a word: the default of
    /// long workloads.
    const WAYS: [Method; 4] = [Method::SrcuCopy, Method::Xchg, Method::Slat, Method::SlatLeaf];

    fn is_engine(self) -> bool {
        matches!(self, Method::Slat | Method::SlatLeaf)
    }
}

/// What was measured on; what was not measured, and why.
struct Notes {
    /// As it was before this thread was pinned.
    host: HostDescription,
    /// The facts of the KVM, if it was measured.
    kvm: Option<KvmFacts>,
    not_run: Vec<NotRun>,
}

pub(crate) fn run(args: &DirtyLogArgs, session: &Session) -> Result<Outcome, Failure> {
    let methods = check_usage(args)?;
    let memory = subject::memory(args.backing, args.slot_bytes())?;
    if args.workload != Workload::Range {
        subject::touch(&memory);
    }
    let (subjects, notes) = with_format!(args.format, F => subjects::<F>(args, &methods, &memory))?;
    running::on_first_cpu(|| match args.workload {
        Workload::Migration => migration::measure(args, session, subjects, &notes, &memory),
        workload => {
            let mut bench = Bench::new(subjects, memory);
            let outcome = |cells: &[Cell]| {
                Outcome::new(figures::results(args, &notes, cells), |out| figures::print(out, args, &notes, cells))
            };
            if workload == Workload::Range {
                return range::measure(args, session, &mut bench, &notes);
            }
            bench.populate(session)?;
            match workload {
                Workload::Framebuffer => run::framebuffer(args, session, &mut bench, outcome),
                _ => run::table(args, session, &mut bench, outcome),
            }
        }
    })
}

/// The methods to measure, without KVM.
fn check_usage(args: &DirtyLogArgs) -> Result<Vec<Method>, Failure> {
    if args.paging == PagingArg::Shadow {
        check_shadow_format(args.format)?;
    }
    let has_pages = matches!(args.workload, Workload::Table | Workload::Range);
    let nr_pages = args.nr_pages();
    let too_many = args.pages.iter().flatten().copied().find(|&pages| pages > nr_pages);
    refuse([
        (
            !has_pages && (args.pages.is_some() || args.pattern.is_some()),
            "--pages and --pattern are for the table and the range; leave them out",
        ),
        (args.workload != Workload::Range && args.window.is_some(), "--window is for the range; leave it out"),
        (args.workload != Workload::Migration && args.rate.is_some(), "--rate is for the migration; leave it out"),
        (
            too_many.is_some(),
            &format!(
                "{} dirty pages of a slot that has {nr_pages}; choose fewer, or a larger slot (-b)",
                too_many.unwrap_or_default()
            ),
        ),
    ])?;
    let all = Method::value_variants().iter().copied().filter(|&method| method != Method::Kvm);
    let Some(chosen) = &args.method else {
        return Ok(match args.workload {
            Workload::Table | Workload::Framebuffer => all.collect(),
            Workload::Migration | Workload::Range => Method::WAYS.to_vec(),
        });
    };
    ensure!(
        peer::has_exchange16() || !chosen.contains(&Method::Xchg16),
        CannotServe,
        "its CPUs have no exchange of 16 bytes, for xchg16; choose another --method"
    );
    // In the order of the columns, each once.
    Ok(all.filter(|method| chosen.contains(method)).collect())
}

type Subjects = Vec<Subject>;

/// All that are measured.
fn subjects<F: HardwareFormat>(
    args: &DirtyLogArgs,
    methods: &[Method],
    memory: &Backing,
) -> Result<(Subjects, Notes), Failure> {
    let mut subjects = Subjects::new();
    let mut notes = Notes { host: HostDescription::read(), kvm: None, not_run: Vec::new() };
    let nr_others = args.running_vcpus();
    for &method in methods {
        subjects.push(match method {
            Method::Slat | Method::SlatLeaf => match args.paging {
                PagingArg::Flat | PagingArg::TwoDimensional => subject::slat::<F>(method, memory, nr_others)?,
                PagingArg::Shadow => subject::slat_shadow(method, memory, nr_others)?,
            },
            Method::Xchg16 if !peer::has_exchange16() => {
                let why = "the CPUs have no exchange of 16 bytes".to_owned();
                notes.not_run.push(NotRun { what: "xchg16".to_owned(), why });
                continue;
            }
            _ => peer::peer::<F>(method, memory, nr_others)?,
        });
    }
    let (kvm, not_run) = args.peer.kvm(|| working_kvm(memory, nr_others))?;
    notes.not_run.extend(not_run);
    if let Some((kvm, facts)) = kvm {
        subjects.push(kvm);
        notes.kvm = Some(facts);
    }
    Ok((subjects, notes))
}

/// A KVM whose guest has written a page, and whose log was got while its other vCPUs ran.
fn working_kvm(memory: &Backing, nr_others: u16) -> Result<(Subject, KvmFacts), Failure> {
    let facts = crate::kvm::facts()?;
    let mut kvm = kvm::kvm(memory, nr_others)?;
    let mut log = vec![0; pattern::nr_words((memory.size_bytes() >> Gfn::SHIFT) as u32)];
    kvm.guest.write(&[0], 1)?;
    kvm.others.run()?;
    // This call clears the page's bit too: later calls begin with a clean log.
    kvm.log.get(&mut log)?;
    kvm.others.pause()?;
    Ok((kvm, facts))
}
