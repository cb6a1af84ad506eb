//! The memory that this machine shares with another one: QEMU's device `ivshmem-plain`, whose
//! second memory range it is (QEMU, docs/specs/ivshmem-spec.rst). The firmware has given the range
//! its address.

#![expect(unsafe_code, reason = "reads and writes the configuration of devices, and names their memory")]

use core::sync::atomic::AtomicU64;

use thiserror::Error;
use x86_64::instructions::port::Port;

/// The ports of configuration mechanism #1 (PCI Local Bus Specification 3.0, 3.2.2.3.2).
const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
const ENABLE: u32 = 1 << 31;

/// Devices of a bus.
const NR_DEVICES: u32 = 32;

/// Vendor and device of the shared memory.
const SHARED_MEMORY: u32 = 0x1110_1af4;

/// The command register, whose bit 1 lets a device have memory (6.2.2).
const COMMAND: u32 = 0x04;
const COMMAND_MEMORY: u32 = 1 << 1;
/// The base address register of the range: 64 bits wide, of which bits 3:0 say what it is (6.2.5.1).
const BASE_ADDRESS_2: u32 = 0x18;
const BASE_ADDRESS_3: u32 = 0x1c;
const NO_ADDRESS: u32 = 0xf;

/// Why there is no shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum NoSharedMemory {
    /// There is no such device.
    #[error("the machine has no device with shared memory (1af4:1110)")]
    NoDevice,
    /// Its memory is not where the image can reach it.
    #[error("the shared memory is at {address:#x}, with {size_bytes} bytes, where it cannot be reached")]
    Unreachable {
        /// The address.
        address: u64,
        /// The size.
        size_bytes: u64,
    },
}

/// A device of bus 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Device(u32);

impl Device {
    fn select(self, register: u32) {
        // SAFETY: each PC has the port; the image owns it.
        unsafe { Port::<u32>::new(ADDRESS).write(ENABLE | self.0 << 11 | register) };
    }

    fn read(self, register: u32) -> u32 {
        self.select(register);
        // SAFETY: as above; reading the configuration changes nothing.
        unsafe { Port::<u32>::new(DATA).read() }
    }

    /// # Safety
    /// The device may have `value` there.
    unsafe fn write(self, register: u32, value: u32) {
        self.select(register);
        // SAFETY: as the caller promises.
        unsafe { Port::<u32>::new(DATA).write(value) };
    }
}

/// The shared memory.
///
/// # Errors
/// [`NoSharedMemory`].
pub fn shared_memory() -> Result<&'static [AtomicU64], NoSharedMemory> {
    let device = (0..NR_DEVICES).map(Device).find(|device| device.read(0) == SHARED_MEMORY);
    let device = device.ok_or(NoSharedMemory::NoDevice)?;
    let [low, high] = [BASE_ADDRESS_2, BASE_ADDRESS_3].map(|register| device.read(register));
    let command = device.read(COMMAND);
    // The size: the bits that stay 0 when all are written. Meanwhile the device has no memory.
    // SAFETY: nothing uses the device, and it gets its address back.
    let size = unsafe {
        device.write(COMMAND, command & !COMMAND_MEMORY);
        device.write(BASE_ADDRESS_2, u32::MAX);
        device.write(BASE_ADDRESS_3, u32::MAX);
        let size = [BASE_ADDRESS_2, BASE_ADDRESS_3].map(|register| device.read(register));
        device.write(BASE_ADDRESS_2, low);
        device.write(BASE_ADDRESS_3, high);
        device.write(COMMAND, command | COMMAND_MEMORY);
        size
    };
    let address = u64::from(high) << 32 | u64::from(low & !NO_ADDRESS);
    let size_bytes = (u64::from(size[1]) << 32 | u64::from(size[0] & !NO_ADDRESS)).wrapping_neg();
    let end = address.checked_add(size_bytes);
    if address == 0 || size_bytes == 0 || end.is_none_or(|end| end > 1 << 32) {
        return Err(NoSharedMemory::Unreachable { address, size_bytes });
    }
    // SAFETY: memory is mapped to itself below 4 GiB. The range is memory that other machines may
    // write at any time, and that stays: atomic words.
    Ok(unsafe { core::slice::from_raw_parts(address as *const AtomicU64, size_bytes as usize / 8) })
}
