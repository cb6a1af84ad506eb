//! What a guest is beside its memory: its CPU, and its devices.

#![expect(unsafe_code, reason = "sees structures of integers as words, and passes registers of the CPU on")]

use alloc::boxed::Box;

use x86_64::registers::model_specific::Msr;

use super::devices::Devices;
use super::vcpu::GuestCpu;
use crate::arch::x86::clock;
use crate::arch::x86::page::Zeroed;
use crate::arch::x86::registers::Registers;
use crate::arch::x86::svm::SvmCpu;
use crate::arch::x86::svm::vmcb::Save;
use crate::{fail, say};

/// Changes with each change of the structure.
const VERSION: u64 = 1;

/// TSC_AUX, which RDTSCP reads: the one register of the guest that VMLOAD does not exchange (AMD
/// APM vol. 2, 15.5.2, and appendix A).
const TSC_AUX: u32 = 0xc000_0103;

/// Words of the save area that have registers: up to PAT, at 268h (appendix B, table B-2).
const SAVE_WORDS: usize = 0x270 / 8;
/// Words of the general and floating-point registers.
const REGISTER_WORDS: usize = (512 + 15 * 8) / 8;

/// A CPU that has left the guest, and the devices.
#[derive(Clone, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct State {
    version: u64,
    save: [u64; SAVE_WORDS],
    registers: [u64; REGISTER_WORDS],
    /// The event to deliver at the next entry, the interrupt that waits, the interrupt shadow.
    events: [u64; 3],
    /// The guest's time-stamp counter.
    tsc: u64,
    tsc_aux: u64,
    devices: Devices,
}

const _: () = {
    // No gap, so words.
    assert!(align_of::<State>() == 8);
    assert!(size_of::<State>() == (1 + SAVE_WORDS + REGISTER_WORDS + 3 + 2) * 8 + size_of::<Devices>());
    assert!(size_of::<State>() <= 4096);
    assert!(size_of::<Save>() >= SAVE_WORDS * 8 && size_of::<Registers>() >= REGISTER_WORDS * 8);
};

// SAFETY: integers.
unsafe impl Zeroed for State {}

impl State {
    const WORDS: usize = size_of::<State>() / 8;

    /// As words.
    pub fn words(&self) -> &[u64] {
        // SAFETY: a structure of words, without gaps.
        unsafe { core::slice::from_raw_parts(core::ptr::from_ref(self).cast(), State::WORDS) }
    }

    /// What these words are. `None`: no state of this version.
    pub fn from_words(words: &[u64]) -> Option<Box<State>> {
        let mut state = State::zeroed();
        if words.len() != State::WORDS || words[0] != VERSION {
            return None;
        }
        // SAFETY: as many words as the structure has, all values of which are valid.
        unsafe {
            core::ptr::from_mut(&mut *state).cast::<u64>().copy_from_nonoverlapping(words.as_ptr(), State::WORDS)
        };
        Some(state)
    }

    /// That of `cpu`, which is outside of the guest, and of the devices. `None`: an interrupt is in
    /// service, so it is not the moment.
    fn of(cpu: &mut SvmCpu) -> Option<Box<State>> {
        let devices = Devices::read()?;
        let mut state = State::zeroed();
        state.version = VERSION;
        state.devices = devices;
        // SAFETY: the general registers, and the begin of the save area, are integers without gaps.
        unsafe {
            state.registers = core::ptr::from_ref(&*cpu.registers).cast::<[u64; REGISTER_WORDS]>().read();
            state.save = core::ptr::from_ref(cpu.save()).cast::<[u64; SAVE_WORDS]>().read();
            state.tsc_aux = Msr::new(TSC_AUX).read();
        }
        let control = cpu.control();
        state.events = [control.event_injection, control.virtual_interrupts, control.interrupt_shadow];
        state.tsc = clock::ticks().wrapping_add(control.tsc_offset);
        Some(state)
    }

    /// Gives it to `cpu`, which the guest has not used, and to the devices.
    fn give_to(&self, cpu: &mut SvmCpu) {
        // SAFETY: as in `of`. What the registers are is the guest's, which they alone concern: the
        // block's other half says what a guest may do.
        unsafe {
            core::ptr::from_mut(&mut *cpu.registers).cast::<[u64; REGISTER_WORDS]>().write(self.registers);
            core::ptr::from_mut(cpu.save()).cast::<[u64; SAVE_WORDS]>().write(self.save);
            Msr::new(TSC_AUX).write(self.tsc_aux);
        }
        self.devices.write();
        let control = cpu.control();
        [control.event_injection, control.virtual_interrupts, control.interrupt_shadow] = self.events;
        control.tsc_offset = self.tsc.wrapping_sub(clock::ticks());
    }
}

impl GuestCpu {
    /// Leaves the guest for good, if this is the moment: `answer` gets what it is. This CPU halts.
    pub(super) fn leave(&mut self, answer: impl FnOnce(Box<State>)) {
        if let Some(state) = State::of(&mut self.cpu) {
            answer(state);
            crate::arch::halt();
        }
    }

    /// Becomes the CPU of a guest that has come.
    pub(super) fn arrive(&mut self, state: &State) {
        state.give_to(&mut self.cpu);
        let rip = self.cpu.save().rip;
        if rip == 0 {
            fail!("the guest that came has no instruction to go on with");
        }
        say!("the guest goes on at {rip:#x}");
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn a_state_comes_as_it_went() {
        let mut words: Vec<u64> = (100..).take(State::WORDS).collect();
        assert_eq!(State::from_words(&words), None);
        words[0] = VERSION;
        let state = State::from_words(&words).unwrap();
        assert_eq!((state.words(), state.tsc_aux), (&words[..], 100 + (1 + SAVE_WORDS + REGISTER_WORDS + 4) as u64));
        words.pop();
        assert_eq!(State::from_words(&words), None);
        assert_eq!(State::from_words(&[]), None);
    }
}
