//! What the engine does, observed from outside: on the host of `common`, for all formats.
//!
//! One binary with many modules. The engine is generic over the host and the format, so each binary
//! compiles it again, five times, which took most of the time to build the tests. Only tests of the
//! whole process need a binary of their own: a global allocator, or another kind of build.

#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../support/shadow_cpu.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod shadow_cpu;

mod attributes;
mod backing_gone;
mod bad_input;
mod block_fault;
mod break_before_make;

mod concurrent;
mod concurrent_dirty;
mod concurrent_huge;
mod directory_protection;
mod dirty_bits;
mod dirty_log;
mod dirty_log_huge;
mod dirty_log_lazy;

mod dirty_ring;
mod fault;
mod fault_around;
mod for_each_dirty;
mod geometry;
mod guard_length;
mod huge_pages;
mod huge_placement;
mod incoherent_walkers;
mod invalidate;
mod kvm_cases;
mod lock_hold;
mod log_ranges;
mod memory_types;
#[path = "../model/mod.rs"]
mod model;
mod overtaken;
mod overtaken_dirty;
mod overtaken_huge;
mod overtaken_invalidate;
mod peers_bugs;
mod pinned;
mod pinned_overtaken;
mod prefault;
mod resize;

mod shadow;
mod shadow_bad_input;
mod shadow_threads;
mod strict_cpu;
mod support_matrix;
mod unseen;
mod untouched;
mod unwinding;
mod userfault;
mod userfault_kvm;
mod userfault_overtaken;
mod userfault_threads;
