//! What a guest's CPU is: it goes with the guest to another machine.

#![expect(unsafe_code, reason = "sees structures of integers as words, and passes registers of the CPU on")]

use alloc::boxed::Box;

use x86_64::registers::model_specific::Msr;

use super::cpu::PcCpu;
use super::devices::{Devices, Local};
use super::vcpu::GuestCpu;
use crate::arch::x86::page::Zeroed;
use crate::arch::x86::registers::Registers;
use crate::arch::x86::svm::SvmCpu;
use crate::arch::x86::svm::vmcb::Save;
use crate::fail;
use crate::migration::source::Departure;
use crate::migration::target::Target;

/// TSC_AUX, which RDTSCP reads: neither VMRUN nor VMLOAD exchanges it (AMD APM vol. 2, 15.5.2, and
/// appendix A). The same goes for DR0 to DR3, which do not move with the guest.
const TSC_AUX: u32 = 0xc000_0103;

/// Words of the save area that have registers: up to PAT, at 268h (appendix B, table B-2).
const SAVE_WORDS: usize = 0x270 / 8;
/// Words of the general and floating-point registers.
const REGISTER_WORDS: usize = (512 + 15 * 8) / 8;

/// A structure that goes to another machine, as words.
///
/// # Safety
/// It consists of integers without gaps, is aligned as words are, and as large as some. The first
/// word is its version.
pub(super) unsafe trait Words: Zeroed {
    /// Changes with each change of the structure.
    const VERSION: u64;
}

/// As words.
#[expect(private_bounds, reason = "the types are named")]
pub fn words<T: Words>(of: &T) -> &[u64] {
    // SAFETY: as the trait promises.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(of).cast(), size_of::<T>() / 8) }
}

/// What these words are. `None`: no such structure of this version.
#[expect(private_bounds, reason = "the types are named")]
pub fn from_words<T: Words>(words: &[u64]) -> Option<Box<T>> {
    let mut of = T::zeroed();
    let nr_words = size_of::<T>() / 8;
    if words.len() != nr_words || words.first() != Some(&T::VERSION) {
        return None;
    }
    // SAFETY: as many words as the structure has, all values of which are valid.
    unsafe { core::ptr::from_mut(&mut *of).cast::<u64>().copy_from_nonoverlapping(words.as_ptr(), nr_words) };
    Some(of)
}

/// A CPU that has left the guest.
#[derive(Clone, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct State {
    version: u64,
    save: [u64; SAVE_WORDS],
    registers: [u64; REGISTER_WORDS],
    /// The event to deliver at the next entry, the interrupt that waits, the interrupt shadow.
    events: [u64; 3],
    tsc_aux: u64,
    local: Local,
}

const _: () = {
    // No gap, so words.
    assert!(align_of::<State>() == 8);
    assert!(size_of::<State>() == (1 + SAVE_WORDS + REGISTER_WORDS + 3 + 1) * 8 + size_of::<Local>());
    assert!(size_of::<State>() <= 4096);
    assert!(size_of::<Save>() >= SAVE_WORDS * 8 && size_of::<Registers>() >= REGISTER_WORDS * 8);
};

// SAFETY: integers.
unsafe impl Zeroed for State {}

// SAFETY: words without gaps, as checked above.
unsafe impl Words for State {
    const VERSION: u64 = 1;
}

impl State {
    /// That of `cpu`, which is outside of the guest, on the calling CPU. `None`: an interrupt is in
    /// service, so it is not the moment.
    pub(super) fn of(cpu: &mut SvmCpu) -> Option<Box<State>> {
        let local = Local::read()?;
        let mut state = State::zeroed();
        state.version = State::VERSION;
        state.local = local;
        // SAFETY: the general registers, and the begin of the save area, are integers without gaps.
        unsafe {
            state.registers = core::ptr::from_ref(&*cpu.registers).cast::<[u64; REGISTER_WORDS]>().read();
            state.save = core::ptr::from_ref(cpu.save()).cast::<[u64; SAVE_WORDS]>().read();
            state.tsc_aux = Msr::new(TSC_AUX).read();
        }
        state.events = cpu.events();
        Some(state)
    }

    /// Gives it to `cpu`, which the guest has not used, and to the calling CPU. The guest's
    /// time-stamp counter is `tsc_offset` ahead of the machine's.
    pub(super) fn give_to(&self, cpu: &mut SvmCpu, tsc_offset: u64) {
        // SAFETY: as in `of`. What the registers are is the guest's, which they alone concern: the
        // block's other half says what a guest may do.
        unsafe {
            core::ptr::from_mut(&mut *cpu.registers).cast::<[u64; REGISTER_WORDS]>().write(self.registers);
            core::ptr::from_mut(cpu.save()).cast::<[u64; SAVE_WORDS]>().write(self.save);
            Msr::new(TSC_AUX).write(self.tsc_aux);
        }
        self.local.write();
        cpu.set_events(self.events);
        cpu.set_tsc_offset(tsc_offset);
    }

    /// The devices of the guest whose CPUs are `states`, none of which is in the guest.
    pub fn devices_of(states: &[State]) -> Box<Devices> {
        Devices::read(states.iter().map(|state| &state.local))
    }
}

impl<C: PcCpu> GuestCpu<C> {
    /// Stays outside of the guest while all CPUs stop, and leaves for good if it is the moment for
    /// all of them.
    pub(super) fn stop(&mut self, departure: &Departure) {
        departure.stop(self.number(), || self.cpu.moved());
    }

    /// Becomes the CPU of a guest that has come.
    pub(super) fn arrive(&mut self, target: &Target) {
        let (state, tsc_offset) = target.wait_for_state(self.number());
        self.cpu.become_moved(state, tsc_offset);
        if self.cpu.pc() == 0 {
            fail!("the guest that came has no instruction to go on with");
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn a_state_comes_as_it_went() {
        let nr_words = size_of::<State>() / 8;
        let mut sent: Vec<u64> = (100..).take(nr_words).collect();
        assert_eq!(from_words::<State>(&sent), None);
        sent[0] = State::VERSION;
        let state = from_words::<State>(&sent).unwrap();
        assert_eq!(words(&*state), sent);
        assert_eq!(state.tsc_aux, 100 + (1 + SAVE_WORDS + REGISTER_WORDS + 3) as u64);
        sent.pop();
        assert_eq!(from_words::<State>(&sent), None);
        assert_eq!(from_words::<State>(&[]), None);
    }
}
