//! The next steps after errors of the libraries. Their errors describe the problem in their own
//! terms; this module names the options and permissions of the command that solve it. Errors that
//! name these themselves have no next step here.

use slat::error::{ConfigError, FaultError, LogError, RangeError, SlotError};
use slat_machine::linux::topology::PinError;
use slat_machine::memory::MemoryError;
use slat_machine::memory::numa::NumaError;
use slat_machine::paging::{RequestError, SourceError, UserfaultfdError};
use slat_machine::vm::demand_paging::{DemandPagingError, PagingConfigError, ServeError, VcpuError};
use slat_machine::vm::host::HostError;
use slat_machine::vm::machine::{MachineConfigError, MachineError};

/// An error that the user cannot cause.
const REPORT: &str = "please report this with the command line";

/// A thread that cannot be started.
pub(super) const THREADS: &str = "choose fewer vCPUs, or raise `ulimit -u`";

const LESS_MEMORY: &str = "choose less memory or fewer vCPUs";
const NO_USERFAULTFD: &str = "bring pages by userfault exits instead (--exits, without --uffd)";

pub(super) fn of_machine(error: &MachineError) -> &'static str {
    match error {
        MachineError::Config(error) => of_config(error),
        MachineError::Memory(error) => of_memory(error),
        MachineError::Host(error) => of_host(error),
        MachineError::Engine(error) => of_engine(error),
        MachineError::Pin(error) => of_pin(error),
        MachineError::Numa(error) => of_numa(error),
        MachineError::NoOtherNode => "choose more nodes (--nodes) or vCPUs, or --first-touch own",
        MachineError::Thread { .. } => THREADS,
        _ => REPORT,
    }
}

fn of_config(error: &MachineConfigError) -> &'static str {
    match error {
        MachineConfigError::NoVcpus => "choose at least one (-v)",
        MachineConfigError::TooManyVcpus { .. } => "choose fewer (-v)",
        MachineConfigError::TooManySlots { .. } => "choose fewer slots",
        MachineConfigError::BytesPerVcpu { .. } => "choose another size (-b)",
        MachineConfigError::TooBig { .. } => LESS_MEMORY,
        MachineConfigError::Slots { .. } => "choose another number of slots, or more memory",
        MachineConfigError::Pins { .. } => "name a CPU for each vCPU",
        _ => REPORT,
    }
}

fn of_memory(error: &MemoryError) -> &'static str {
    match error {
        MemoryError::ZeroSize | MemoryError::UnalignedSize { .. } => {
            "choose another size, or another kind of memory (-s)"
        }
        MemoryError::NotEnoughMemory { .. } => LESS_MEMORY,
        // The error has the command for it.
        MemoryError::NotEnoughHugePages { .. } => "",
        MemoryError::UnknownKind { .. } | MemoryError::NotShared { .. } => "choose another kind of memory (-s)",
        MemoryError::System { .. } => "choose less memory, or another kind (-s)",
        _ => REPORT,
    }
}

fn of_host(error: &HostError) -> &'static str {
    match error {
        HostError::NoAddressSpace { .. } => "raise `ulimit -v`, or choose less memory",
        HostError::Numa(error) => of_numa(error),
        _ => REPORT,
    }
}

fn of_engine(error: &slat::Error) -> &'static str {
    match error {
        slat::Error::Slot(SlotError::SlotTooHigh { .. }) => "choose fewer slots",
        slat::Error::Config(ConfigError::BadRingSize { .. }) => "choose another --ring-entries",
        slat::Error::Config(ConfigError::BadShadowPages { .. }) => "choose another --max-pages",
        slat::Error::Config(ConfigError::OutOfMemory)
        | slat::Error::Slot(SlotError::OutOfMemory)
        | slat::Error::Log(LogError::OutOfMemory)
        | slat::Error::Fault(FaultError::OutOfMemory)
        | slat::Error::Range(RangeError::OutOfMemory) => LESS_MEMORY,
        _ => REPORT,
    }
}

fn of_pin(error: &PinError) -> &'static str {
    match error {
        PinError::NoSuchCpu { .. } => "name CPUs of this machine: `lscpu --extended` lists them",
        _ => "name CPUs that this process may use: `taskset -cp $$` lists them",
    }
}

fn of_numa(error: &NumaError) -> &'static str {
    if error.is_bad_usage() { "choose other --nodes" } else { "use virtual nodes: --nodes 8" }
}

pub(super) fn of_source(error: &SourceError) -> &'static str {
    match error {
        SourceError::OutOfRange { .. } => "name a larger file, or choose less memory (-b)",
        SourceError::Unavailable { .. } => "start the peer first: slat serve-pages ADDRESS",
        SourceError::NotThere { .. } | SourceError::Refused { .. } => "name another peer (--source)",
        // Files, and addresses to serve at.
        _ => "name another file or address; `slat userfault --create-source` writes a file",
    }
}

pub(super) fn of_request(error: &RequestError) -> &'static str {
    match error {
        RequestError::Source { error, .. } => of_source(error),
        RequestError::Wait(_) => "raise `ulimit -n`, or choose fewer vCPUs",
        _ => REPORT,
    }
}

fn of_userfaultfd(error: &UserfaultfdError) -> &'static str {
    match error {
        UserfaultfdError::Open(_) => NO_USERFAULTFD,
        // One descriptor for each vCPU may exceed the limit.
        UserfaultfdError::System { .. } => "raise `ulimit -n`, or choose one descriptor (--single-uffd)",
        _ => REPORT,
    }
}

pub(super) fn of_paging(error: &DemandPagingError) -> &'static str {
    match error {
        DemandPagingError::Config(error) => of_paging_config(error),
        DemandPagingError::Memory(error) => of_memory(error),
        DemandPagingError::Host(error) => of_host(error),
        DemandPagingError::Engine(error) => of_engine(error),
        DemandPagingError::Userfaultfd(error) => of_userfaultfd(error),
        DemandPagingError::Pin(error) => of_pin(error),
        DemandPagingError::Delivery(_) => "raise `ulimit -n`, or choose fewer vCPUs",
        DemandPagingError::Thread(_) => THREADS,
        DemandPagingError::WrongResolver { .. } => "choose another --delivery",
        DemandPagingError::Vcpus { errors } => errors.first().map_or(REPORT, |(_, error)| of_vcpu(error)),
        DemandPagingError::Background { error, .. } => of_vcpu(error),
        _ => REPORT,
    }
}

fn of_paging_config(error: &PagingConfigError) -> &'static str {
    match error {
        PagingConfigError::Vcpus { .. } => "choose another number (-v)",
        PagingConfigError::BytesPerVcpu { .. } => "choose another size (-b)",
        PagingConfigError::TooBig { .. } => LESS_MEMORY,
        PagingConfigError::NeedsFile { .. } => "choose -s shmem",
        PagingConfigError::NeedsSmallPages { .. } => "choose memory of small pages (-s), and --granularity 4K",
        PagingConfigError::UnknownBacking { .. } | PagingConfigError::NeedsMapping { .. } => {
            "choose another kind of memory (-s)"
        }
        PagingConfigError::Readers { .. } => "choose another number (--readers)",
        PagingConfigError::NeedsThreadPerVcpu { .. } => "leave --threads out",
        PagingConfigError::NoCopier { .. } => "leave --copier out, or choose --exits without --uffd",
        PagingConfigError::Pins { .. } => "name a CPU for each vCPU (--cpus)",
        _ => REPORT,
    }
}

fn of_vcpu(error: &VcpuError) -> &'static str {
    match error {
        VcpuError::Source(error) => of_request(error),
        VcpuError::Delivery(_) => "choose fewer vCPUs, or --resolver thread",
        VcpuError::Userfaultfd(error) => of_userfaultfd(error),
        VcpuError::Pin(error) => of_pin(error),
        VcpuError::Resolver { .. } => "look at --source",
        _ => REPORT,
    }
}

pub(super) fn of_serving(error: &ServeError) -> &'static str {
    match error {
        ServeError::Source(error) => of_request(error),
        ServeError::Handshake(_) => "raise `ulimit -n`, or use --resolver thread",
        ServeError::NoMemory => "choose -s shmem",
        ServeError::Thread(_) => THREADS,
        _ => "use --resolver thread",
    }
}
