//! What the deliveries and the software machine ask of Linux: memory files, eventfds, mappings,
//! sockets.

pub mod descriptors;
pub mod mapping;
pub mod unix_socket;
