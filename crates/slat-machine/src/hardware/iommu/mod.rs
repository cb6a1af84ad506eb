//! An IOMMU: DMA of devices to guest memory, through VT-d's second-stage page tables and an IOTLB.
//!
//! # Guarantees
//! - DMA completes through one translation, which was valid from its look-up to its side effect, or
//!   not at all: the flush rule of [`commit`](crate::hardware::commit), as for CPUs.
//! - A fault is recorded and never resolved, as hardware does it: the request is aborted
//!   ([`DmaError::Aborted`]).
//!
//! # Use
//! Make an [`Iommu`] for the root of a [`Vm`] in the format [`Vtd`], and a [`DmaEngine`]
//! for each thread that does DMA. Their flush domain is that of the VM's host. [`Iommu::faults`]
//! has what was aborted: nothing, as long as devices access what is mapped.
//!
//! # Implementation
//! A DMA engine is a [`Cpu`] with another handler: its TLB is the IOTLB, and its walker that of
//! VT-d. Each engine has an IOTLB of its own, as a device with a translation cache (ATS) has. The
//! handler records each fault and answers that it cannot be handled.
//!
//! The IOTLB keeps a translation as long as it may. So if the engine of the page tables changes one
//! and does not flush it, DMA goes on through the old translation, and the test that owns the frame
//! notices.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use parking_lot::Mutex;
use slat::error::FaultError;
use slat::format::{Hardware, Vtd};
use slat::shadow::Gva;
use slat::{Access, Exit, Gpa, Host, Hpa, Outcome, Vm};
use thiserror::Error;

use crate::hardware::commit::Port;
use crate::hardware::cpu::{Cpu, CpuCounters, CpuError, FaultHandler};
use crate::hardware::tlb::Geometry;
use crate::hardware::walk::{Fault, Misconfiguration, Processor};

/// Fault records that are kept; later ones are counted (VT-d specification, 7.2 "Fault Overflow").
const MAX_RECORDS: usize = 64;

/// A fault that an IOMMU recorded (VT-d specification, 10.4.14 "Fault Recording Registers").
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{access:?} of {gpa} by device {source_id} is aborted for reason {reason:#x}")]
pub struct FaultRecord {
    /// The device that made the request.
    pub source_id: u16,
    /// The address of the request.
    pub gpa: Gpa,
    /// A read or a write.
    pub access: Access,
    /// The fault reason (7.1.3).
    pub reason: u8,
}

/// Why DMA did not complete. It has neither read nor written anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum DmaError {
    /// The IOMMU aborted it.
    #[error(transparent)]
    Aborted(#[from] FaultRecord),
    /// The address is not a multiple of 8, or the page tables lead where there is no memory.
    #[error(transparent)]
    Machine(CpuError),
}

#[derive(Debug, Default)]
struct Records {
    kept: Vec<FaultRecord>,
    nr_faults: u64,
}

/// The IOMMU of one VM: where its tables are, and the faults of all DMA.
#[derive(Debug)]
pub struct Iommu {
    root: Hpa,
    processor: Processor,
    records: Mutex<Records>,
}

impl Iommu {
    /// One that walks the page tables of `vm`, which was configured for `hardware`.
    pub fn new<H: Host>(vm: &Vm<H, Vtd>, hardware: &Hardware) -> Arc<Iommu> {
        let processor = Processor::of_vm(vm, hardware);
        Arc::new(Iommu { root: vm.root(), processor, records: Mutex::default() })
    }

    /// How many requests were aborted, and the records of the first of them.
    pub fn faults(&self) -> (u64, Vec<FaultRecord>) {
        let records = self.records.lock();
        (records.nr_faults, records.kept.clone())
    }

    fn record(&self, record: FaultRecord) {
        let mut records = self.records.lock();
        records.nr_faults += 1;
        if records.kept.len() < MAX_RECORDS {
            records.kept.push(record);
        }
    }
}

/// Records the faults of one device.
#[derive(Debug)]
struct Recorder {
    iommu: Arc<Iommu>,
    source_id: u16,
    /// That of the request under way.
    last: Option<FaultRecord>,
}

impl Recorder {
    fn record(&mut self, gpa: Gpa, access: Access, code: u64) {
        // A reason has eight bits.
        let record = FaultRecord { source_id: self.source_id, gpa, access, reason: code as u8 };
        self.iommu.record(record);
        self.last = Some(record);
    }
}

impl FaultHandler for Recorder {
    fn handle_fault(&mut self, fault: Fault) -> Result<Outcome, FaultError> {
        let Fault { gpa, access, code } = fault;
        self.record(gpa, access, code);
        Ok(Outcome::Exit(Exit::Mmio { gpa, access }))
    }
}

/// What does the DMA of one device, on one thread at a time.
#[derive(Debug)]
pub struct DmaEngine {
    cpu: Cpu<Recorder, Vtd>,
}

impl DmaEngine {
    /// The engine of the device `source_id` behind `iommu`. `port` is in the flush domain of the
    /// host of the page tables.
    pub fn new(iommu: &Arc<Iommu>, source_id: u16, port: Port, iotlb: Geometry) -> DmaEngine {
        let recorder = Recorder { iommu: Arc::clone(iommu), source_id, last: None };
        let cpu = Cpu::new(recorder, port, source_id, iommu.root, iotlb).with_processor(iommu.processor);
        DmaEngine { cpu }
    }

    /// Reads the 8 bytes at `gpa`.
    ///
    /// # Errors
    /// [`DmaError`]: nothing was read.
    pub fn read(&mut self, gpa: Gpa) -> Result<u64, DmaError> {
        let result = self.cpu.read(Gva(gpa.0));
        self.checked(result)
    }

    /// Writes the 8 bytes at `gpa`.
    ///
    /// # Errors
    /// [`DmaError`]: nothing was written.
    pub fn write(&mut self, gpa: Gpa, value: u64) -> Result<(), DmaError> {
        let result = self.cpu.write(Gva(gpa.0), value);
        self.checked(result)
    }

    /// What it has done.
    pub fn counters(&self) -> CpuCounters {
        self.cpu.counters()
    }

    /// The device is idle until its next request: flushes ignore it.
    pub fn rest(&mut self) {
        self.cpu.exit_guest_mode();
    }

    fn checked<T>(&mut self, result: Result<T, CpuError>) -> Result<T, DmaError> {
        let error = match result {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        let recorder = self.cpu.handler();
        match error {
            CpuError::Misconfigured(Misconfiguration { gpa, code, .. }) => {
                recorder.record(gpa, Access::Read, code);
            }
            CpuError::Exit(_) => {}
            error => return Err(DmaError::Machine(error)),
        }
        Err(recorder.last.take().map_or(DmaError::Machine(error), DmaError::Aborted))
    }
}
