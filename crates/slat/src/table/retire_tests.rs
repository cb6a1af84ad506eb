//! Which epoch is announced while guards nest.

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
