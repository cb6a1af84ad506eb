//! What is examined: a guest's CPUs, as the guest sees them. The engine under the hypervisor's CPUs is one; CPUs that are
//! made wrong on purpose, so that one knows that the oracle would notice, are the other.

use slat::shadow::{PagingRegister, PagingRegisters, Privilege};
use slat::{Access, Error};

use super::world::World;

/// What became of an instruction that changes what a CPU has cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Executed {
    Done,
    /// #GP(0), and nothing has changed.
    GeneralProtection,
}

/// How a write that may be done is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    Cpu,
    /// The instruction is emulated: [`Subject::write_table`].
    Emulation,
}

/// Where a write that was emulated went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Written {
    Memory,
    /// Nowhere: no memory is there.
    Mmio {
        gpa: u64,
    },
}

/// What became of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Observed {
    /// It was done here; or it may be, by emulation, and nothing was written yet.
    Reached { gpa: u64, by: By },
    /// #PF.
    Fault { error_code: u32 },
    /// No memory is at this address, where this was to be done.
    Mmio { gpa: u64, access: Access },
    /// No memory is at this address, where an entry of a table was to be read.
    TableMmio { gpa: u64 },
}

/// What the host does beside the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostEvent {
    /// A page gets another frame.
    MoveFrame {
        gfn: u64,
    },
    /// The second stage looks who has used what.
    Age {
        first_gfn: u64,
        nr_pages: u64,
    },
    Reclaim,
}

pub trait Subject {
    fn world(&self) -> &World;
    /// The registers of a CPU that is reset, or restored.
    fn set_registers(&mut self, cpu: usize, registers: PagingRegisters) -> Result<(), Error>;
    /// MOV to CR0 and CR4, WRMSR of EFER.
    fn write_register(&mut self, cpu: usize, register: PagingRegister, value: u64) -> Result<Executed, Error>;
    fn load_cr3(&mut self, cpu: usize, value: u64) -> Result<Executed, Error>;
    fn invlpg(&mut self, cpu: usize, la: u64) -> Result<(), Error>;
    fn invpcid(&mut self, cpu: usize, kind: u64, descriptor: [u64; 2]) -> Result<Executed, Error>;
    /// One access. When a CPU of the host's reaches memory it calls `effect` with the address: no flush returns, and no frame
    /// moves, before that does.
    fn access(
        &mut self,
        cpu: usize,
        la: u64,
        access: Access,
        privilege: Privilege,
        effect: &mut dyn FnMut(&World, u64),
    ) -> Result<Observed, Error>;
    /// A write that is emulated for this CPU.
    fn write_table(&mut self, cpu: usize, gpa: u64, bytes: &[u8]) -> Result<Written, Error>;
    /// Something that the guest does not notice.
    fn host_event(&mut self, event: HostEvent);
    /// The pages of a slot that lies at `first_gfn` which were written since this was last asked.
    fn harvest(&mut self, slot: usize, first_gfn: u64) -> std::collections::BTreeSet<u64>;
    /// Takes a slot away.
    fn delete_slot(&mut self, slot: usize, first_gfn: u64);
    /// Makes a slot, at the place it has by default, with these contents.
    fn create_slot(&mut self, slot: usize, contents: Option<&[u64]>);
    fn move_slot(&mut self, slot: usize, from: u64, to: u64);
}
