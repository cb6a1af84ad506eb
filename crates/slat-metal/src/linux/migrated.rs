//! Linux that goes to another machine, or comes from one.

use crate::arch::linux::{Cpu, Guest};
use crate::arch::pci;
use crate::boot::BootInfo;
use crate::error;
use crate::linux::{Beside, Linux, OWN_BYTES, Parts, Stage, modules};
use crate::memslot::Memslot;
use crate::migration::channel::{Channel, Side};
use crate::migration::source::Departure;
use crate::migration::{Source, Target};
use crate::options::Options;

use super::{GuestFormat, LinuxCpu};

impl Parts<Cpu> {
    /// For a guest that migrates: no copy of its memory.
    fn of_migration(options: &Options, free_bytes: u64) -> Parts<Cpu> {
        Parts::new(options, free_bytes, (options.memory_mib << 20) + OWN_BYTES)
    }

    fn memslot(&self) -> Memslot<GuestFormat> {
        Memslot::new(&self.vm, 0, self.start, &self.ram)
            .unwrap_or_else(|error| error!("no memslot for the guest: {error}"))
    }
}

fn channel(side: Side) -> Channel {
    Channel::new(pci::shared_memory().unwrap_or_else(|error| error!("no channel: {error}")), side)
}

impl Linux {
    /// A guest in the modules that the boot loader has put into memory, which goes to another
    /// machine. `free_bytes` of memory are free.
    pub fn source(options: Options, boot: &BootInfo, free_bytes: u64) -> Linux {
        let channel = channel(Side::Source);
        let modules = modules(boot);
        let parts = Parts::of_migration(&options, free_bytes);
        let source = Source::new(parts.memslot(), channel, &options);
        let guest = Guest::new(&options, boot, modules, &mut parts.slots(), &parts.ram);
        parts.with(options, guest, Beside::Source(source))
    }

    /// A guest that comes from another machine. `free_bytes` of memory are free.
    pub fn target(options: Options, boot: &BootInfo, free_bytes: u64) -> Linux {
        let channel = channel(Side::Target);
        let parts = Parts::of_migration(&options, free_bytes);
        let target = Target::new(parts.memslot(), channel, &options);
        let guest = Guest::without_kernel(&options, boot, &mut parts.slots());
        parts.with(options, guest, Beside::Target(target))
    }
}

impl<C: LinuxCpu> Linux<C> {
    /// How far the guest is.
    pub(crate) fn stage(&self) -> Stage {
        *self.stage.lock()
    }

    /// A guest that is to go to another machine does no more rounds before that machine is there:
    /// else it might have done all.
    pub(crate) fn wait_for_target(&self) {
        if let Beside::Source(source) = &self.beside {
            source.wait_for_target();
        }
    }

    /// The guest goes on here, and has done `nr_rounds` rounds.
    pub(crate) fn resume_in_round(&self, nr_rounds: u64) {
        self.set_round(nr_rounds);
    }

    /// The order to stop for good, where there may be one.
    pub(crate) fn departure(&self) -> Option<&Departure> {
        match &self.beside {
            Beside::Source(source) => Some(&source.departure),
            Beside::Operations(_) | Beside::Target(_) => None,
        }
    }

    /// The machine to which the guest comes, if this is one.
    pub(crate) fn arrival(&self) -> Option<&Target> {
        match &self.beside {
            Beside::Target(target) => Some(target),
            Beside::Operations(_) | Beside::Source(_) => None,
        }
    }
}
