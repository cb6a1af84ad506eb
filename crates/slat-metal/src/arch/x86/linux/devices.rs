//! The devices that a guest uses by itself, as far as it gives them a state: they go with the guest
//! to another machine.
//!
//! - The local interrupt controller: priority, local vectors, the timer and what is left of it, the
//!   interrupts that wait. None may be in service.
//! - The I/O interrupt controller: the redirections, and the register that is selected.
//! - The masks of the two 8259s, none of whose interrupts may come to the CPU.
//! - The mode of channel 0 of the PIT, which must be idle, or as the firmware has left it.
//! - The registers of the first serial line.
//!
//! A guest that migrates has no HPET and no PM timer as a clock (`hpet=disable`, `clocksource=tsc`).
//! The events of ACPI, the keyboard and the real-time clock are not there: none of them comes here.

#![expect(unsafe_code, reason = "reads and writes the registers of devices")]

use alloc::boxed::Box;

use x86_64::instructions::port::Port;
use x86_64::registers::model_specific::Msr;

use super::state::Words;
use crate::arch::x86::page::Zeroed;
use crate::arch::x86::{apic, clock};
use crate::fail;

/// Registers of the local controller in x2APIC mode, in the order in which they are written: the
/// spurious vector, which turns it on, first (Intel SDM vol. 3A, table 11-6).
const LOCAL: [u32; 9] = [
    0x80f, // spurious vector
    0x808, // task priority
    0x832, // timer
    0x833, // thermal sensor
    0x834, // performance counters
    0x835, // LINT0
    0x836, // LINT1
    0x837, // error
    0x83e, // divide configuration
];
/// Where the timer's vector is among them, and that of LINT0.
const TIMER: usize = 2;
const LINT0: usize = 5;
/// Bits of a local vector that cannot be written: delivery status, remote IRR (11.5.1).
const LOCAL_READ_ONLY: u64 = 1 << 12 | 1 << 14;
/// A local vector that is masked.
const MASKED: u64 = 1 << 16;
/// The mode of the timer's vector, bits 18:17; 0 is one-shot.
const TIMER_MODE: u64 = 3 << 17;

/// What the timer begins with, and what is left of it.
const INITIAL_COUNT: u32 = 0x838;
const CURRENT_COUNT: u32 = 0x839;
/// Interrupts in service, and those that wait: 8 registers of 32 bits each.
const IN_SERVICE: u32 = 0x810;
const REQUESTED: u32 = 0x820;

/// The interrupt command "this CPU" (bits 19:18), with the level of an assertion.
const TO_SELF: u64 = 1 << 18 | 1 << 14;

/// The I/O controller (Intel 82093AA data sheet, 3.1, 3.2): the selected register, and its data.
const IO_SELECT: u64 = 0xfec0_0000;
const IO_WINDOW: u64 = 0xfec0_0010;
const IO_VERSION: u32 = 1;
const IO_FIRST: u32 = 0x10;
/// Redirections of the controller of a PC.
const NR_REDIRECTIONS: usize = 24;
/// Bits of a redirection that cannot be written: delivery status, remote IRR.
const REDIRECTION_READ_ONLY: u32 = 1 << 12 | 1 << 14;

/// The masks of the 8259s.
const MASK_PORTS: [u16; 2] = [0x21, 0xa1];

/// The PIT (Intel 8254 data sheet): its command register, and channel 0.
const PIT_COMMAND: u16 = 0x43;
const PIT_CHANNEL_0: u16 = 0x40;
/// The read-back command, of the status of channel 0.
const PIT_READ_STATUS: u8 = 0xe2;
/// Bits of the status that a command sets: access, mode.
const PIT_MODE: u8 = 0x3f;
/// The mode of those, bits 3:1; 0 is "interrupt on terminal count".
const PIT_MODE_NUMBER: u8 = 7 << 1;

/// The first serial line, a 16550 (National Semiconductor PC16550D data sheet, table 2).
const SERIAL: u16 = 0x3f8;
const SERIAL_ENABLE: u16 = 1;
const SERIAL_FIFO: u16 = 2;
const SERIAL_LINE: u16 = 3;
const SERIAL_MODEM: u16 = 4;
const SERIAL_SCRATCH: u16 = 7;
/// The line register's bit that shows the divisor instead of data and interrupts.
const SERIAL_DIVISOR: u8 = 1 << 7;
/// Bits of the interrupt identification that say that the FIFOs are on.
const SERIAL_HAS_FIFO: u8 = 3 << 6;

/// The interrupt controller of one CPU.
#[derive(Clone, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) struct Local {
    registers: [u64; LOCAL.len()],
    timer_count: u64,
    requested: [u64; 8],
}

/// The devices that all CPUs have in common.
#[derive(Clone, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Devices {
    version: u64,
    /// The guest's time-stamp counter, of all CPUs.
    tsc: u64,
    io_selected: u64,
    /// The low half of each, and the high half.
    redirections: [[u32; 2]; NR_REDIRECTIONS],
    masks: [u64; 2],
    pit: u64,
    serial: Serial,
}

#[derive(Clone, PartialEq, Eq, Debug)]
#[repr(C)]
struct Serial {
    enable: u64,
    line: u64,
    modem: u64,
    scratch: u64,
    fifo: u64,
    divisor: u64,
}

fn read_msr(msr: u32) -> u64 {
    // SAFETY: registers of the controller, which is in x2APIC mode (`apic::enable`).
    unsafe { Msr::new(msr).read() }
}

/// # Safety
/// `value` is one that the guest has written there.
unsafe fn write_msr(msr: u32, value: u64) {
    // SAFETY: as the caller promises.
    unsafe { Msr::new(msr).write(value) };
}

fn read_port(port: u16) -> u8 {
    // SAFETY: ports of this module, on every PC. The guest that owns them does not run.
    unsafe { Port::new(port).read() }
}

/// # Safety
/// `value` is one that the guest has written there.
unsafe fn write_port(port: u16, value: u8) {
    // SAFETY: as the caller promises.
    unsafe { Port::new(port).write(value) };
}

/// The register `number` of the I/O controller.
fn read_io(number: u32) -> u32 {
    // SAFETY: the controller of every PC, which is mapped to itself; the guest does not run.
    unsafe {
        (IO_SELECT as *mut u32).write_volatile(number);
        (IO_WINDOW as *const u32).read_volatile()
    }
}

/// # Safety
/// `value` is one that the guest has written there.
unsafe fn write_io(number: u32, value: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        (IO_SELECT as *mut u32).write_volatile(number);
        (IO_WINDOW as *mut u32).write_volatile(value);
    }
}

/// Registers of redirection `index`: the low half, and the high half.
fn redirection(index: usize) -> [u32; 2] {
    let low = IO_FIRST + 2 * index as u32;
    [low, low + 1]
}

impl Serial {
    fn read() -> Serial {
        let line = read_port(SERIAL + SERIAL_LINE);
        // SAFETY: what is shown changes, and nothing else.
        unsafe { write_port(SERIAL + SERIAL_LINE, line | SERIAL_DIVISOR) };
        let divisor = u64::from(read_port(SERIAL)) | u64::from(read_port(SERIAL + 1)) << 8;
        // SAFETY: as above.
        unsafe { write_port(SERIAL + SERIAL_LINE, line & !SERIAL_DIVISOR) };
        let read = |register: u16| u64::from(read_port(SERIAL + register));
        let has_fifo = read_port(SERIAL + SERIAL_FIFO) & SERIAL_HAS_FIFO == SERIAL_HAS_FIFO;
        let serial = Serial {
            enable: read(SERIAL_ENABLE),
            line: u64::from(line),
            modem: read(SERIAL_MODEM),
            scratch: read(SERIAL_SCRATCH),
            fifo: u64::from(has_fifo),
            divisor,
        };
        // SAFETY: as it was.
        unsafe { write_port(SERIAL + SERIAL_LINE, line) };
        serial
    }

    /// The interrupts last: one that waits for an empty transmitter comes at once.
    fn write(&self) {
        let line = self.line as u8;
        // SAFETY: values of the guest.
        unsafe {
            write_port(SERIAL + SERIAL_LINE, line | SERIAL_DIVISOR);
            write_port(SERIAL, self.divisor as u8);
            write_port(SERIAL + 1, (self.divisor >> 8) as u8);
            write_port(SERIAL + SERIAL_LINE, line & !SERIAL_DIVISOR);
            write_port(SERIAL + SERIAL_FIFO, self.fifo as u8);
            write_port(SERIAL + SERIAL_MODEM, self.modem as u8);
            write_port(SERIAL + SERIAL_SCRATCH, self.scratch as u8);
            write_port(SERIAL + SERIAL_ENABLE, self.enable as u8);
            write_port(SERIAL + SERIAL_LINE, line);
        }
    }
}

fn read_pit() -> u8 {
    // SAFETY: the status is latched, and nothing else changes.
    unsafe { write_port(PIT_COMMAND, PIT_READ_STATUS) };
    read_port(PIT_CHANNEL_0) & PIT_MODE
}

impl Local {
    /// That of the calling CPU, whose guest CPU has left the guest. `None`: an interrupt is in
    /// service.
    pub(super) fn read() -> Option<Local> {
        let in_service = (0..8).any(|index| read_msr(IN_SERVICE + index) != 0);
        if in_service {
            return None;
        }
        // First: it goes on.
        let (initial, current) = (read_msr(INITIAL_COUNT), read_msr(CURRENT_COUNT));
        let registers = LOCAL.map(read_msr);
        Some(Local {
            registers,
            timer_count: if registers[TIMER] & TIMER_MODE == 0 { current } else { initial },
            requested: core::array::from_fn(|index| read_msr(REQUESTED + index as u32)),
        })
    }

    /// Makes the controller of the calling CPU this one.
    pub(super) fn write(&self) {
        for (&msr, value) in LOCAL.iter().zip(self.registers) {
            // SAFETY: values of the guest. Interrupts that come from here on wait for the guest:
            // this CPU takes none itself.
            unsafe { write_msr(msr, value & !LOCAL_READ_ONLY) };
        }
        for vector in vectors(self.requested) {
            // SAFETY: the guest's interrupt, for this CPU, which runs the guest next.
            unsafe { apic::write_icr(TO_SELF | vector) };
        }
        // SAFETY: as above. Last: it begins.
        unsafe { write_msr(INITIAL_COUNT, self.timer_count) };
    }

    /// Whether the 8259s can interrupt this CPU.
    fn hears_8259s(&self) -> bool {
        self.registers[LINT0] & MASKED == 0
    }
}

// SAFETY: integers.
unsafe impl Zeroed for Devices {}

// SAFETY: words and pairs of half words, without gaps.
unsafe impl Words for Devices {
    const VERSION: u64 = 1;
}

impl Devices {
    /// Those of this machine. No CPU is in the guest, and no interrupt in service. `locals` are the
    /// interrupt controllers of the CPUs.
    pub(super) fn read<'l>(mut locals: impl Iterator<Item = &'l Local>) -> Box<Devices> {
        // SAFETY: reading which register is selected changes nothing.
        let io_selected = unsafe { (IO_SELECT as *const u32).read_volatile() };
        let nr_redirections = (read_io(IO_VERSION) >> 16 & 0xff) as usize + 1;
        if nr_redirections != NR_REDIRECTIONS {
            fail!("the I/O interrupt controller has {nr_redirections} redirections, and {NR_REDIRECTIONS} can move");
        }
        let devices = Box::new(Devices {
            version: Devices::VERSION,
            // The source's guest has the machine's counter.
            tsc: clock::ticks(),
            io_selected: u64::from(io_selected),
            redirections: core::array::from_fn(|index| redirection(index).map(read_io)),
            masks: MASK_PORTS.map(|port| u64::from(read_port(port))),
            pit: u64::from(read_pit()),
            serial: Serial::read(),
        });
        if locals.any(Local::hears_8259s) && devices.masks != [0xff, 0xff] {
            fail!("the guest uses the 8259s, with the masks {:#x?}, and these cannot move", devices.masks);
        }
        devices
    }

    /// Makes the devices of this machine these. No CPU is in the guest yet. Returns what the guest's
    /// time-stamp counter is ahead of the machine's.
    pub fn write(&self) -> u64 {
        let pit = read_pit();
        if u64::from(pit) != self.pit && self.pit as u8 & PIT_MODE_NUMBER != 0 {
            fail!("the guest uses channel 0 of the PIT, in the mode {:#x}, and it cannot move", self.pit);
        }
        // SAFETY: values of the guest. Interrupts that come from here on wait for the guest: no CPU
        // takes one itself.
        unsafe {
            if u64::from(pit) != self.pit {
                // Without a count, as the guest has left it.
                write_port(PIT_COMMAND, self.pit as u8);
            }
            MASK_PORTS.iter().zip(self.masks).for_each(|(&port, mask)| write_port(port, mask as u8));
            for (index, [low, high]) in self.redirections.iter().enumerate() {
                let [low_register, high_register] = redirection(index);
                write_io(high_register, *high);
                write_io(low_register, low & !REDIRECTION_READ_ONLY);
            }
            (IO_SELECT as *mut u32).write_volatile(self.io_selected as u32);
        }
        self.serial.write();
        self.tsc.wrapping_sub(clock::ticks())
    }
}

/// The numbers of the bits that are set, 32 in each word.
fn vectors(words: [u64; 8]) -> impl Iterator<Item = u64> {
    (0..256).filter(move |vector| words[*vector as usize / 32] & 1 << (vector % 32) != 0)
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn interrupts_that_wait_have_their_vectors() {
        let found: Vec<_> = vectors([0, 1 << 1, 0, 0, 0, 0, 0, 1 << 12 | 1 << 31]).collect();
        assert_eq!(found, [33, 236, 255]);
    }

    #[test]
    fn redirections_have_two_registers() {
        assert_eq!([0, 23].map(redirection), [[0x10, 0x11], [0x3e, 0x3f]]);
    }
}
