//! The column of the real KVM: the same phases, by the KVM of this machine (`crate::kvm`), with as
//! many vCPUs on as much memory of the same kind. Each vCPU has its own thread (`vcpus`), and its
//! guest writes one word to each of its pages, in order: the value that the engine's guests write.
//!
//! Some options are the engine's only: the format of the tables, the paging, the way of protecting
//! and of splitting. KVM does all that as its modules are configured (`KvmFacts`). What its guest
//! cannot do is refused.
//!
//! Every log is compared with the writes, and must be empty once it was cleared. Since each round
//! writes all pages, a last round, which is not timed, writes an eighth of each part only. At the
//! end memory must hold the last writes.

mod vcpus;

use std::ops::Range;

use slat::Gfn;
use slat::dirty::ManualProtect;
use slat_machine::linux::topology::pin_current_thread;
use slat_machine::memory::{Backing, BackingKind};
use slat_machine::vm::guest::{Sharing, value};
use slat_machine::vm::machine::{MachineError, Pins};

use crate::dirty_log::compare_log;
use crate::failure::{Failure, LEAVE_KVM_OUT, check_failed, ensure};
use crate::kvm::{KvmError, KvmFacts, KvmVm, Logging, MAX_REGION_BYTES, VmShape, facts, nearest_manual_protect};
use crate::options::{DirtyTrackingArg, HugePagesArg, Named, PeerArg, ValueName};
use crate::phases::PhasesArgs;
use crate::phases::{self, Column, Kind, POPULATE_ROUND, Run, timed};
use crate::results::{NotRun, Results};
use vcpus::Vcpus;

/// The fraction of each vCPU's part that the untimed round writes.
const SPARSE_SHARE: u64 = 8;

/// The KVM, or why there is none.
pub(super) struct Peer {
    kvm: Option<Kvm>,
    not_run: Option<NotRun>,
}

struct Kvm {
    facts: KvmFacts,
    plan: Plan,
    /// The mode of the engine, which KVM would have if it could.
    wanted: ManualProtect,
}

impl Peer {
    /// The peer that `--peer` names, after a test run.
    pub(super) fn new(args: &PhasesArgs, peer: PeerArg) -> Result<Peer, Failure> {
        if peer == PeerArg::Kvm
            && let Some(why) = cannot(args)
        {
            return Err(Failure::Usage(format!("--peer kvm: {why}; --peer none leaves KVM out")));
        }
        let (kvm, not_run) =
            peer.kvm(|| cannot(args).map_or_else(|| Kvm::new(args), |why| Err(Failure::CannotServe(why))))?;
        Ok(Peer { kvm, not_run })
    }

    /// Its column, if there is one.
    pub(super) fn kind(&self) -> Option<Kind> {
        let kvm = self.kvm.as_ref()?;
        let mut kind = Kind::new("lock", "kvm", "kvm".to_owned(), None);
        kind.labels.insert("measured_on".to_owned(), kvm.facts.measured_on().into());
        Some(kind)
    }

    pub(super) fn run(&self) -> Result<Run, Failure> {
        match &self.kvm {
            Some(kvm) => kvm.plan.run(),
            None => Err(Failure::CannotServe(format!("there is no KVM to measure{LEAVE_KVM_OUT}"))),
        }
    }

    pub(super) fn notes(&self, column: Option<&Column>) -> Vec<String> {
        let Some(kvm) = &self.kvm else {
            return self.not_run.iter().map(NotRun::to_string).collect();
        };
        let mut notes = vec![format!(
            "kvm: measured on {}. Its guest runs in 64-bit mode on pages of 2 MiB; tables, paging and protection named above \
             are the engine's, not KVM's.",
            kvm.facts.measured_on()
        )];
        notes.extend(kvm.facts.lines());
        let has = kvm.plan.manual_protect;
        if has != kvm.wanted {
            let [has, wanted] = [has, kvm.wanted].map(Named::name);
            notes.push(format!("This KVM has no manual protect '{wanted}': its log is '{has}'."));
        }
        // The logs of the rounds, and of the sparse one.
        let nr_logs: usize = column.iter().flat_map(|column| &column.runs).map(|run| run.get.len() + 1).sum();
        if nr_logs != 0 {
            notes.push(format!(
                "kvm: {nr_logs} logs had exactly the pages that were written, and nothing once they were cleared."
            ));
        }
        notes
    }

    /// Adds to `results` the facts of this KVM, or why there is none.
    pub(super) fn complete(&self, results: &mut Results) {
        results.host.kvm = self.kvm.as_ref().map(|kvm| kvm.facts.json());
        results.not_run.extend(self.not_run.clone());
    }
}

/// The first option that KVM's column cannot serve.
fn cannot(args: &PhasesArgs) -> Option<String> {
    let its_guest = |what: &str| Some(format!("its guest cannot do {what}"));
    match args {
        _ if args.tracking != DirtyTrackingArg::WriteProtect => {
            Some(format!("--tracking {} is for the engine only; KVM logs as it is set up", args.tracking.name()))
        }
        _ if args.huge_pages == HugePagesArg::MarkWhole => {
            Some("--huge-pages mark-whole is for the engine only; KVM logs pages of 4 KiB".to_owned())
        }
        _ if args.write_percent != 100 => its_guest("--write-percent, it only writes"),
        _ if args.random_access => its_guest("--random-access, it writes its pages in order"),
        _ if args.run_while_disabling => its_guest("--run-while-disabling, it makes one pass"),
        _ if args.guest.bytes.saturating_mul(args.guest.vcpus as u64) > MAX_REGION_BYTES => {
            Some(format!("its guest has room for {} GiB in all", MAX_REGION_BYTES >> 30))
        }
        _ => None,
    }
}

impl Kvm {
    fn new(args: &PhasesArgs) -> Result<Kvm, Failure> {
        let wanted = phases::manual_protect(args);
        let plan = Plan {
            nr_vcpus: args.guest.vcpus,
            pages_per_vcpu: args.guest.bytes >> Gfn::SHIFT,
            nr_slots: u32::try_from(args.slots).unwrap_or(u32::MAX),
            backing: args.guest.backing,
            sharing: if args.guest.overlap { Sharing::Overlapping } else { Sharing::Partitioned },
            nr_rounds: args.iterations,
            manual_protect: nearest_manual_protect(wanted)?,
            pins: args.cpus.as_deref().map(|cpus| phases::pins(cpus, args.guest.vcpus)).transpose()?,
        };
        let small =
            Plan { pages_per_vcpu: 1, nr_slots: 1, nr_rounds: 1, backing: BackingKind::Anonymous, ..plan.clone() };
        small.run()?;
        Ok(Kvm { facts: facts()?, plan, wanted })
    }
}

/// The parameters of a run.
#[derive(Clone)]
struct Plan {
    nr_vcpus: usize,
    pages_per_vcpu: u64,
    nr_slots: u32,
    backing: BackingKind,
    sharing: Sharing,
    nr_rounds: u32,
    manual_protect: ManualProtect,
    pins: Option<Pins>,
}

impl Plan {
    fn nr_pages(&self) -> u64 {
        self.pages_per_vcpu * self.nr_vcpus as u64
    }

    /// The pages that vCPU number `vcpu` writes.
    fn part(&self, vcpu: u64) -> Range<u64> {
        match self.sharing {
            Sharing::Partitioned => vcpu * self.pages_per_vcpu..(vcpu + 1) * self.pages_per_vcpu,
            Sharing::Overlapping => 0..self.nr_pages(),
        }
    }

    /// The pages that it writes in the sparse round.
    fn sparse_part(&self, vcpu: u64) -> Range<u64> {
        let first = vcpu * self.pages_per_vcpu;
        first..first + self.nr_sparse()
    }

    /// How many these are.
    fn nr_sparse(&self) -> u64 {
        self.pages_per_vcpu.div_ceil(SPARSE_SHARE)
    }

    fn is_sparse(&self, page: u64) -> bool {
        page % self.pages_per_vcpu < self.nr_sparse()
    }

    /// Runs the phases once, with a new VM on new memory.
    fn run(&self) -> Result<Run, Failure> {
        let memory = Backing::new(self.backing, self.nr_pages() << Gfn::SHIFT).map_err(MachineError::from)?;
        let shape = VmShape {
            nr_vcpus: self.nr_vcpus,
            nr_slots: self.nr_slots,
            nr_listed: 0,
            manual_protect: self.manual_protect,
        };
        let (vm, guests) = KvmVm::new(&memory, &shape)?;
        if let Some(main) = self.pins.as_ref().and_then(|pins| pins.main) {
            pin_current_thread(main).map_err(MachineError::from)?;
        }
        vcpus::with_threads(guests, self.pins.as_ref(), |vcpus| self.phases(&vm, &memory, vcpus))
    }

    fn phases(&self, vm: &KvmVm, memory: &Backing, vcpus: &Vcpus) -> Result<Run, Failure> {
        let mut log = Log::new(vm, self.manual_protect);
        let mut round = POPULATE_ROUND;
        let populate = vcpus.write(|vcpu| self.part(vcpu), round)?;
        let enable = timed(|| vm.set_logging(Logging::On))?;
        let (mut dirty, mut get, mut clear) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.nr_rounds {
            round += 1;
            dirty.push(vcpus.write(|vcpu| self.part(vcpu), round)?);
            get.push(timed(|| log.get())?);
            log.check(round, |_| true)?;
            if log.is_cleared_apart() {
                clear.push(timed(|| log.clear())?);
            }
            log.check_empty()?;
        }
        vcpus.write(|vcpu| self.sparse_part(vcpu), round + 1)?;
        log.get()?;
        log.check(round + 1, |page| self.is_sparse(page))?;
        if log.is_cleared_apart() {
            log.clear()?;
        }
        log.check_empty()?;
        let disable = timed(|| vm.set_logging(Logging::Off))?;
        for page in 0..self.nr_pages() {
            let round = if self.is_sparse(page) { round + 1 } else { round };
            let found = memory.peek(page);
            ensure!(
                found == Some(value(round, page)),
                Check,
                "KVM's page {page} holds {found:#x?}, not that of round {round}"
            );
        }
        Ok(Run {
            populate,
            split: None,
            enable,
            dirty,
            get,
            clear,
            disable,
            nr_verified: self.nr_pages(),
            engine: None,
        })
    }
}

/// The log of KVM, and the pages that it reported.
struct Log<'a> {
    vm: &'a KvmVm,
    manual_protect: ManualProtect,
    bitmaps: Vec<Vec<u64>>,
}

impl<'a> Log<'a> {
    fn new(vm: &'a KvmVm, manual_protect: ManualProtect) -> Log<'a> {
        Log { vm, manual_protect, bitmaps: vm.empty_bitmaps() }
    }

    /// Whether getting leaves the clearing to [`clear`](Log::clear).
    fn is_cleared_apart(&self) -> bool {
        self.manual_protect != ManualProtect::Disabled
    }

    fn get(&mut self) -> Result<(), KvmError> {
        (0..).zip(&mut self.bitmaps).try_for_each(|(slot, bitmap)| self.vm.get_dirty_log(slot, bitmap))
    }

    /// Clears the pages that were got.
    fn clear(&self) -> Result<(), KvmError> {
        (0..).zip(&self.bitmaps).try_for_each(|(slot, bitmap)| self.vm.clear_dirty_log(slot, bitmap))
    }

    /// Compares the log with the pages that were written in `round`.
    fn check(&self, round: u64, is_written: impl Fn(u64) -> bool) -> Result<(), Failure> {
        compare_log(&self.bitmaps, self.vm.pages_per_slot, is_written)
            .map_err(|wrong| check_failed(format_args!("KVM's dirty log of round {round}: {wrong}")))
    }

    /// Gets the log once more, which must be empty.
    fn check_empty(&mut self) -> Result<(), Failure> {
        self.get()?;
        ensure!(
            self.bitmaps.iter().flatten().all(|&word| word == 0),
            Check,
            "KVM's dirty log is not empty after it was cleared"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logs and memory are checked by the run itself; without a KVM there is nothing to run.
    #[test]
    fn the_phases_hold_in_each_mode_of_the_log() {
        for mode in [ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet] {
            if !nearest_manual_protect(mode).is_ok_and(|has| has == mode) {
                continue;
            }
            for sharing in [Sharing::Partitioned, Sharing::Overlapping] {
                let plan = Plan {
                    nr_vcpus: 3,
                    pages_per_vcpu: 70,
                    nr_slots: 2,
                    backing: BackingKind::Anonymous,
                    sharing,
                    nr_rounds: 2,
                    manual_protect: mode,
                    pins: None,
                };
                match plan.run() {
                    Ok(run) => {
                        assert_eq!((run.dirty.len(), run.get.len(), run.nr_verified), (2, 2, 210));
                        assert_eq!(run.clear.len(), if mode == ManualProtect::Disabled { 0 } else { 2 });
                    }
                    // A KVM that cannot run this guest at all.
                    Err(failure) => {
                        assert!(matches!(failure, Failure::CannotServe(_)), "{mode:?} {sharing:?}: {failure}")
                    }
                }
            }
        }
    }
}
