//! What the deliveries and the software machine ask of Linux: memory files, eventfds, mappings.

pub mod descriptors;
pub mod mapping;
