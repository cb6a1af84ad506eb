//! A guest that runs wild: it uses registers, ports and instructions that it does not have, writes
//! its own page tables at random, and executes random bytes. Nothing of that may reach the machine.
//!
//! # What is checked
//! - The hypervisor itself has no exception, and ends the run with its verdict.
//! - The image's text, which the guest may read and execute, stays as it was.
//! - So do frames that are around those of the guest, and that it does not have.
//!
//! # A life
//! The guest begins anew ("lives") after a triple fault, when the CPU refuses its state, when it
//! made [`MAX_EXITS`] exits, and when it makes no steps any more: another CPU kicks it now and then.
//! A refused register is #GP; an instruction that a guest has not, #UD; a port that is not there
//! reads as ones; and so does memory, as far as the guest is concerned: the access is #GP.

#![expect(unsafe_code, reason = "runs a guest")]

mod program;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use slat::format::LeafAttributes;
use slat::{Config, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, Pfn, Vm};

use super::registers::Event;
use super::registers::{Hypercall, Trap};
use super::svm::SvmCpu;
use crate::arch::clock;
use crate::arch::guest::write_page_tables;
use crate::boot;
use crate::console::{self, Verdict};
use crate::cpus::{Cpus, Presence};
use crate::host::{Backing, Control, MetalHost};
use crate::memory::own_node;
use crate::operations::MetalVm;
use crate::options::Options;
use crate::private::{PRIVATE_BYTES, Private};
use crate::ram::{Frames, POISON, Ram};
use crate::start::Work;
use crate::suite::guest::mix;
use crate::virtual_cpu::{Exit, SecondStage, Start, VirtualCpu};
use crate::{error, fail};
use program::Mailbox;

/// Exits of a life, at most.
const MAX_EXITS: u64 = 2000;
/// Exits without a step of the program between them, after which it counts as stuck: it leaves by
/// kicks alone, or each exception leads to another one.
const MAX_IDLE_EXITS: u64 = 16;
/// Microseconds between two kicks.
const KICK_US: u64 = 3000;

/// Frames before and behind those of the guest.
const NR_GUARDS: usize = 16;

/// What the guest has done, and why its lives ended.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    exits: u64,
    lives: u64,
    msrs: u64,
    ports: u64,
    cpuids: u64,
    undefined: u64,
    hypercalls: u64,
    /// Accesses that tables of the second stage allow, once they are mapped, and others.
    faults: u64,
    absent: u64,
    kicks: u64,
    /// Ends: by a triple fault, by a state that the CPU refuses, without a step, by another exit.
    shutdowns: u64,
    refused: u64,
    stuck: u64,
    others: u64,
}

impl Counts {
    fn figures(&self) {
        let Counts { exits, lives, msrs, ports, cpuids, undefined, hypercalls, faults, absent, .. } = *self;
        let Counts { kicks, shutdowns, refused, stuck, others, .. } = *self;
        for (name, count) in [
            ("exits", exits),
            ("lives", lives),
            ("msr_exits", msrs),
            ("port_exits", ports),
            ("cpuid_exits", cpuids),
            ("undefined_exits", undefined),
            ("hypercall_exits", hypercalls),
            ("faults", faults),
            ("absent_faults", absent),
            ("kicks", kicks),
            ("ends_by_triple_fault", shutdowns),
            ("ends_by_refused_state", refused),
            ("ends_without_a_step", stuck),
            ("ends_by_other_exits", others),
        ] {
            console::figure(name, count, "1");
        }
    }
}

/// The guest, and what it must not reach.
struct Wild {
    cpu: SvmCpu,
    presence: Presence,
    vcpu: crate::operations::MetalVcpu<<SvmCpu as VirtualCpu>::Format>,
    second_stage: SecondStage,
    vm: Arc<MetalVm<<SvmCpu as VirtualCpu>::Format>>,
    // After the VM.
    private: Private,
    guards: Vec<Frames>,
    text: u64,
    seed: u64,
    counts: Counts,
}

/// A number that depends on each word of the image's text.
fn text_number() -> u64 {
    let text = boot::image_text();
    // SAFETY: the image's text, which nothing writes; the linker script has it in whole pages.
    let words = unsafe { core::slice::from_raw_parts(text.start as *const u64, (text.size_bytes() / 8) as usize) };
    words.iter().fold(0, |number, &word| mix(number ^ word))
}

impl Wild {
    fn new(seed: u64, cpus: &Arc<Cpus>) -> Wild {
        let config = Config::default().with_hardware(SvmCpu::hardware());
        let vm = Vm::new(MetalHost { cpus: cpus.clone() }, config).unwrap_or_else(|error| error!("no VM: {error}"));
        let vm = Arc::new(vm);
        let guard = || Frames::allocate(1).unwrap_or_else(|| error!("no memory for guards"));
        let mut guards: Vec<_> = (0..NR_GUARDS).map(|_| guard()).collect();
        let private = Private::new(program::PRIVATE_START, own_node());
        let ram = Arc::new(Ram::new(program::RAM_BYTES / PAGE_SIZE, |_, words| {
            words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }));
        guards.extend((0..NR_GUARDS).map(|_| guard()));
        guards.iter().flat_map(|guard| guard.words(0)).for_each(|word| word.store(POISON, Ordering::Relaxed));
        let text = boot::image_text();
        // SAFETY: the image's text, which the guest may only read, and private memory, which goes
        // after the VM.
        let fixed = |first| unsafe { Backing::fixed(first, first, LeafAttributes::default()) };
        let image = fixed(Pfn(text.start / PAGE_SIZE));
        let flags = MemoryRegionFlags::empty();
        for (slot, flags, guest_phys_addr, memory_size, backing) in [
            (0, MemoryRegionFlags::READONLY, Gpa(text.start), text.size_bytes(), image),
            (1, flags, private.gpa, PRIVATE_BYTES, fixed(private.first_frame())),
            (2, flags, program::RAM_START, program::RAM_BYTES, Backing::Ram(ram)),
        ] {
            let backing = Some(backing);
            let region = MemoryRegion { slot, flags, guest_phys_addr, memory_size, backing, userfault_bitmap: None };
            vm.set_user_memory_region(region).unwrap_or_else(|error| error!("no memslot {slot}: {error}"));
        }
        let vcpu = vm.create_vcpu().unwrap_or_else(|error| error!("no vCPU: {error}"));
        let second_stage = SecondStage::of(&vm, &config);
        // SAFETY: virtualization is on (`start`). The vCPU keeps the VM, which has this CPU.
        let cpu = unsafe { SvmCpu::new(second_stage) };
        // SAFETY: the only one of these CPUs.
        let presence = unsafe { Presence::new(cpus, 0) };
        let (text, counts) = (text_number(), Counts::default());
        Wild { cpu, presence, vcpu, second_stage, vm, private, guards, text, seed, counts }
    }

    /// Ends the run if the guest has changed what it must not reach.
    fn check(&self) {
        if text_number() != self.text {
            fail!("the image's text has changed");
        }
        for (number, guard) in self.guards.iter().enumerate() {
            if let Some(place) = guard.words(0).iter().position(|word| word.load(Ordering::Relaxed) != POISON) {
                fail!("frame {} was written, at byte {}: guard {number}", guard.first(), place * 8);
            }
        }
    }

    /// The guest begins anew.
    fn begin(&mut self) {
        self.counts.lives += 1;
        let word = |offset, value| self.private.word(offset).store(value, Ordering::Relaxed);
        // Nothing of an earlier life.
        (0..program::EXCEPTION_STACK / 8).for_each(|index| word(8 * index, 0));
        write_page_tables(&self.private);
        word(program::MAILBOX, mix(self.seed ^ self.counts.lives << 32));
        let gpa = self.private.gpa.0;
        // A 64-bit code segment and a data segment (AMD APM vol. 2, 4.8).
        word(program::GDT + 8, 0x00af_9b00_0000_ffff);
        word(program::GDT + 16, 0x00cf_9300_0000_ffff);
        // The first stack of the interrupt-stack table, at byte 24h of the task state (12.2.5).
        let stack = gpa + program::EXCEPTION_STACK;
        word(program::TASK + 0x20, stack << 32);
        word(program::TASK + 0x28, stack >> 32);
        // Interrupt gates of that stack (4.8.4).
        let again = program::again as *const () as u64;
        for vector in 0..256 {
            let gate = again & 0xffff | 8 << 16 | 1 << 32 | 0x8e << 40 | (again >> 16 & 0xffff) << 48;
            word(program::IDT + 16 * vector, gate);
            word(program::IDT + 16 * vector + 8, again >> 32);
        }
        // SAFETY: as in `new`. The old one is dropped, and has entered no guest since.
        self.cpu = unsafe { SvmCpu::new(self.second_stage) };
        self.cpu.start(Start {
            pc: program::main as *const () as u64,
            stack: self.private.stack_end().0 - 8,
            tables: gpa,
            argument: self.private.free_gpa().0,
        });
        let save = self.cpu.save();
        (save.gdtr.base, save.gdtr.limit) = (gpa + program::GDT, 0x17);
        (save.idtr.base, save.idtr.limit) = (gpa + program::IDT, 0xfff);
        (save.tr.base, save.tr.limit) = (gpa + program::TASK, 0x67);
        // A new control block: what the CPU keeps is of another one.
        self.presence.forget();
    }

    /// A life of the guest.
    fn live(&mut self) {
        self.begin();
        let mailbox: *const Mailbox =
            core::ptr::with_exposed_provenance((self.private.address() + program::MAILBOX) as usize);
        // What the guest has there may be anything: it is compared alone.
        // SAFETY: words of the block, which lives as long as this.
        let nr_steps = || unsafe { (*mailbox).nr_steps.load(Ordering::Relaxed) };
        let (mut nr_idle, mut last) = (0, 0);
        for _ in 0..MAX_EXITS {
            let exit = self.cpu.run(&self.presence);
            self.counts.exits += 1;
            nr_idle = if nr_steps() == last { nr_idle + 1 } else { 0 };
            last = nr_steps();
            if nr_idle == MAX_IDLE_EXITS {
                self.counts.stuck += 1;
                break;
            }
            match exit {
                Exit::Kick => self.counts.kicks += 1,
                Exit::PageFault { gpa, access } => match self.vcpu.handle_fault(gpa, access) {
                    Ok(Outcome::Resume) => {
                        self.counts.faults += 1;
                        self.presence.resume(&self.vm, gpa);
                    }
                    // No memory, or an address that no table has.
                    Ok(Outcome::Exit(_)) | Err(_) => {
                        self.counts.absent += 1;
                        self.cpu.inject(Event::GeneralProtection);
                    }
                },
                Exit::Hypercall => {
                    self.counts.hypercalls += 1;
                    self.cpu.skip(Hypercall::BYTES);
                }
                Exit::Trapped(Trap::Cpuid) => {
                    self.counts.cpuids += 1;
                    self.cpu.set_result(0);
                    self.cpu.skip(2);
                }
                Exit::Trapped(Trap::ReadMsr | Trap::WriteMsr) => {
                    self.counts.msrs += 1;
                    self.cpu.inject(Event::GeneralProtection);
                }
                Exit::Trapped(Trap::Undefined) => {
                    self.counts.undefined += 1;
                    self.cpu.inject(Event::UndefinedOpcode);
                }
                Exit::Trapped(Trap::Port { next_rip, .. }) => {
                    self.counts.ports += 1;
                    self.cpu.set_result(u64::MAX);
                    self.cpu.save().rip = next_rip;
                }
                Exit::Shutdown => {
                    self.counts.shutdowns += 1;
                    break;
                }
                Exit::Invalid { .. } => {
                    self.counts.refused += 1;
                    break;
                }
                Exit::LogFull | Exit::Misconfigured { .. } | Exit::Other { .. } => {
                    self.counts.others += 1;
                    break;
                }
            }
        }
        self.check();
    }
}

/// The work of all CPUs: the first one runs the guest, the second one kicks it.
pub fn work(options: Options) -> Box<Work> {
    let (cpus, is_over) = (Cpus::new(Control::None, SvmCpu::KICK), AtomicBool::new(false));
    let started = AtomicU64::new(0);
    Box::new(move |cpu| match cpu {
        0 => {
            let mut wild = Wild::new(options.seed, &cpus);
            started.store(1, Ordering::Release);
            while wild.counts.exits < options.nr_operations {
                wild.live();
            }
            is_over.store(true, Ordering::Release);
            cpus.check();
            let counts = wild.counts;
            counts.figures();
            let done = [counts.msrs, counts.ports, counts.cpuids, counts.undefined, counts.faults, counts.absent];
            if options.nr_operations >= 10_000 && done.contains(&0) {
                fail!("the guest did not run wild: one of {done:?} never happened");
            }
            console::figures();
            console::end(
                Verdict::Pass,
                format_args!(
                    "{} exits of a guest that runs wild in {} lives; it has changed nothing that is not its own",
                    counts.exits, counts.lives
                ),
            )
        }
        1 => {
            while !is_over.load(Ordering::Acquire) {
                clock::wait_us(KICK_US);
                if started.load(Ordering::Acquire) != 0 {
                    cpus.kick_all();
                }
            }
        }
        _ => {}
    })
}
