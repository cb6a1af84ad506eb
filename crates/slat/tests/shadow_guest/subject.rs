//! The subject of a test: a guest's CPUs, as the guest observes them. One is the engine under the
//! hypervisor's CPUs. The others are CPUs with a deliberate fault, which show that the oracle
//! detects it.

use slat::Access;
use slat::error::FaultError;
use slat::shadow::{PagingRegister, PagingRegisters, Privilege};

use super::world::World;

/// The result of an instruction that changes what a CPU has cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Executed {
    Done,
    /// #GP(0), and nothing has changed.
    GeneralProtection,
}

/// How a permitted write is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    Cpu,
    /// The instruction is emulated: [`Subject::write_table`].
    Emulation,
}

/// Where an emulated write went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Written {
    Memory,
    /// To no memory: there is none at this address.
    Mmio {
        gpa: u64,
    },
}

/// The result of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Observed {
    /// It was made here; or it may be made by emulation, and nothing was written yet.
    Reached { gpa: u64, by: By },
    /// #PF.
    Fault { error_code: u32 },
    /// There is no memory at the address of the access.
    Mmio { gpa: u64, access: Access },
    /// There is no memory at this address, where a PTE was to be read.
    TableMmio { gpa: u64 },
}

/// An action of the host beside the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostEvent {
    /// A page moves to another frame.
    MoveFrame {
        gfn: u64,
    },
    /// The second stage ages pages.
    Age {
        first_gfn: u64,
        nr_pages: u64,
    },
    Reclaim,
}

pub trait Subject {
    fn world(&self) -> &World;
    /// The registers of a CPU that is reset, or restored.
    fn set_registers(&mut self, cpu: usize, registers: PagingRegisters) -> Result<(), FaultError>;
    /// MOV to CR0 and CR4, WRMSR of EFER.
    fn write_register(&mut self, cpu: usize, register: PagingRegister, value: u64) -> Result<Executed, FaultError>;
    fn load_cr3(&mut self, cpu: usize, value: u64) -> Result<Executed, FaultError>;
    fn invlpg(&mut self, cpu: usize, la: u64) -> Result<(), FaultError>;
    fn invpcid(&mut self, cpu: usize, kind: u64, descriptor: [u64; 2]) -> Result<Executed, FaultError>;
    /// One access. When a CPU of the host reaches memory it calls `effect` with the address. No
    /// flush returns, and no frame moves, before `effect` does.
    fn access(
        &mut self,
        cpu: usize,
        la: u64,
        access: Access,
        privilege: Privilege,
        effect: &mut dyn FnMut(&World, u64),
    ) -> Result<Observed, FaultError>;
    /// An emulated write of this CPU.
    fn write_table(&mut self, cpu: usize, gpa: u64, bytes: &[u8]) -> Result<Written, FaultError>;
    /// An action that the guest does not observe.
    fn host_event(&mut self, event: HostEvent);
    /// The pages of a memslot at `first_gfn` that were written since the last call.
    fn harvest(&mut self, slot: usize, first_gfn: u64) -> std::collections::BTreeSet<u64>;
    /// Deletes a memslot.
    fn delete_slot(&mut self, slot: usize, first_gfn: u64);
    /// Makes a memslot, at its default place, with these contents.
    fn create_slot(&mut self, slot: usize, contents: Option<&[u64]>);
    fn move_slot(&mut self, slot: usize, from: u64, to: u64);
}
