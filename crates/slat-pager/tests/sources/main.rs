//! Sources of snapshots against real files, a real object store, and peers, with the faults of
//! each.

mod bytes;
mod caches;
mod chunks;
mod commands;
mod files;
mod layers;
mod object_store;
mod peers;
mod read_ahead;
mod s3;
