//! Which epoch is announced while guards nest, and whose guards are refused.

#![expect(unsafe_code, reason = "the participant of a vCPU outlives its borrow")]

use super::{Epochs, Fences};

#[test]
fn nested_guards_announce_the_epoch_of_the_first_until_the_last_ends() {
    let epochs = Epochs::new(Fences::Both);
    let participant = epochs.borrow_participant().unwrap();
    let oldest = || epochs.oldest_open(|| ());
    let first = epochs.pin(&participant);
    let tag = epochs.advance_epoch();
    assert_eq!(oldest(), tag);
    let second = epochs.pin(&participant);
    assert_eq!(oldest(), tag);
    drop(first);
    assert_eq!(oldest(), tag);
    drop(second);
    assert_eq!(oldest(), u64::MAX);
}

#[test]
#[should_panic(expected = "two VMs are mixed up")]
fn a_participant_of_other_epochs_opens_no_guard() {
    let (epochs, others) = (Epochs::new(Fences::Both), Epochs::new(Fences::Both));
    let participant = others.borrow_participant().unwrap();
    let _ = epochs.pin(&participant);
}

#[test]
#[should_panic(expected = "two VMs are mixed up")]
fn a_participant_of_other_epochs_has_no_fault() {
    let (epochs, others) = (Epochs::new(Fences::Both), Epochs::new(Fences::Both));
    let mut participant = others.take_participant().unwrap();
    // SAFETY: the epochs are alive, and this is the only one.
    let _ = unsafe { participant.exclusive(&epochs) };
}

#[test]
#[should_panic(expected = "two VMs are mixed up")]
fn a_hazard_pointer_keeps_nothing_of_a_guard_of_another_participant() {
    let epochs = Epochs::new(Fences::Both);
    let (first, mut second) = (epochs.borrow_participant().unwrap(), epochs.borrow_participant().unwrap());
    second.with_hazard().1.check_guard(&epochs.pin(&first));
}
