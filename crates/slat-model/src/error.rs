//! Why a model does not run.

use std::io;

use thiserror::Error;

/// Why a model does not run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A topology is not one.
    #[error("topology {name}: {why}")]
    Topology {
        /// Its name, or its file.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// Parameters are not complete, or no numbers.
    #[error("parameters {name}: {why}")]
    Parameters {
        /// Their file.
        name: String,
        /// What is wrong with them.
        why: String,
    },
    /// The system has no address space for the memory of the machine.
    #[error("no {size_bytes} bytes of address space: {source}")]
    NoAddressSpace {
        /// How much is needed, in bytes.
        size_bytes: usize,
        /// The answer of the system.
        source: io::Error,
    },
    /// More vCPUs than the machine has CPUs, where each has its own.
    #[error("{nr_vcpus} vCPUs, and the topology {topology} has {nr_cpus} CPUs")]
    TooManyVcpus {
        /// The vCPUs.
        nr_vcpus: usize,
        /// The CPUs.
        nr_cpus: usize,
        /// The name of the topology.
        topology: String,
    },
    /// A memory of no pages, or of more than a machine has frames.
    #[error("a memory of {nr_pages} pages; a modelled machine has 1 to {most}")]
    Pages {
        /// The pages.
        nr_pages: u64,
        /// The most.
        most: u64,
    },
    /// The global allocator of the program is not that of the model: accesses would cost nothing.
    #[error("the program's global allocator is not slat_model::arena::Allocator")]
    OtherAllocator,
    /// All tasks wait, and none is left to wake them.
    #[error("all {nr_tasks} tasks of the modelled machine wait for each other at {now_ns} ns")]
    Deadlock {
        /// How many wait.
        nr_tasks: usize,
        /// The virtual time in nanoseconds.
        now_ns: u64,
    },
    /// The engine refused what the model asked for.
    #[error("the engine: {0}")]
    Engine(#[from] slat_costed::Error),
    /// An oracle found something wrong.
    #[error("check failed: {0}")]
    Check(String),
}
