//! Which epoch is announced while guards nest.

use super::{Epochs, Fences};

#[test]
fn the_first_of_nested_sections_is_announced_until_the_last_is_over() {
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
