//! The virtual-machine control structure: its fields (Intel SDM vol. 3D, appendix B "Field Encoding
//! in VMCS"), and the instructions that reach it.

#![expect(unsafe_code, reason = "executes VMX instructions")]

use alloc::boxed::Box;
use core::marker::PhantomData;

use super::enable::revision;
use crate::arch::x86::page::Page;
use crate::error;

/// A field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
#[expect(missing_docs, reason = "fields, by their names in appendix B")]
pub enum Field {
    Vpid = 0x0000,
    GuestEsSelector = 0x0800,
    GuestCsSelector = 0x0802,
    GuestSsSelector = 0x0804,
    GuestDsSelector = 0x0806,
    GuestFsSelector = 0x0808,
    GuestGsSelector = 0x080a,
    GuestLdtrSelector = 0x080c,
    GuestTrSelector = 0x080e,
    LogIndex = 0x0812,
    HostEsSelector = 0x0c00,
    HostCsSelector = 0x0c02,
    HostSsSelector = 0x0c04,
    HostDsSelector = 0x0c06,
    HostFsSelector = 0x0c08,
    HostGsSelector = 0x0c0a,
    HostTrSelector = 0x0c0c,
    PortMapA = 0x2000,
    PortMapB = 0x2002,
    MsrMap = 0x2004,
    LogAddress = 0x200e,
    EptPointer = 0x201a,
    GuestPhysicalAddress = 0x2400,
    LinkPointer = 0x2800,
    GuestDebugctl = 0x2802,
    GuestPat = 0x2804,
    GuestEfer = 0x2806,
    HostPat = 0x2c00,
    HostEfer = 0x2c02,
    PinBasedControls = 0x4000,
    PrimaryControls = 0x4002,
    ExceptionBitmap = 0x4004,
    PageFaultMask = 0x4006,
    PageFaultMatch = 0x4008,
    NrCr3Targets = 0x400a,
    ExitControls = 0x400c,
    NrMsrsToStoreOnExit = 0x400e,
    NrMsrsToLoadOnExit = 0x4010,
    EntryControls = 0x4012,
    NrMsrsToLoadOnEntry = 0x4014,
    EntryInterruption = 0x4016,
    EntryErrorCode = 0x4018,
    SecondaryControls = 0x401e,
    InstructionError = 0x4400,
    ExitReason = 0x4402,
    ExitInterruption = 0x4404,
    DeliveredEvent = 0x4408,
    DeliveredErrorCode = 0x440a,
    ExitInstructionLength = 0x440c,
    GuestEsLimit = 0x4800,
    GuestCsLimit = 0x4802,
    GuestSsLimit = 0x4804,
    GuestDsLimit = 0x4806,
    GuestFsLimit = 0x4808,
    GuestGsLimit = 0x480a,
    GuestLdtrLimit = 0x480c,
    GuestTrLimit = 0x480e,
    GuestGdtrLimit = 0x4810,
    GuestIdtrLimit = 0x4812,
    GuestEsRights = 0x4814,
    GuestCsRights = 0x4816,
    GuestSsRights = 0x4818,
    GuestDsRights = 0x481a,
    GuestFsRights = 0x481c,
    GuestGsRights = 0x481e,
    GuestLdtrRights = 0x4820,
    GuestTrRights = 0x4822,
    GuestInterruptibility = 0x4824,
    GuestActivity = 0x4826,
    GuestSysenterCs = 0x482a,
    PreemptionTimer = 0x482e,
    HostSysenterCs = 0x4c00,
    Cr0Mask = 0x6000,
    Cr4Mask = 0x6002,
    Cr0Shadow = 0x6004,
    Cr4Shadow = 0x6006,
    ExitQualification = 0x6400,
    GuestCr0 = 0x6800,
    GuestCr3 = 0x6802,
    GuestCr4 = 0x6804,
    GuestEsBase = 0x6806,
    GuestCsBase = 0x6808,
    GuestSsBase = 0x680a,
    GuestDsBase = 0x680c,
    GuestFsBase = 0x680e,
    GuestGsBase = 0x6810,
    GuestLdtrBase = 0x6812,
    GuestTrBase = 0x6814,
    GuestGdtrBase = 0x6816,
    GuestIdtrBase = 0x6818,
    GuestDr7 = 0x681a,
    GuestRsp = 0x681c,
    GuestRip = 0x681e,
    GuestRflags = 0x6820,
    GuestPendingDebug = 0x6822,
    GuestSysenterEsp = 0x6824,
    GuestSysenterEip = 0x6826,
    HostCr0 = 0x6c00,
    HostCr3 = 0x6c02,
    HostCr4 = 0x6c04,
    HostFsBase = 0x6c06,
    HostGsBase = 0x6c08,
    HostTrBase = 0x6c0a,
    HostGdtrBase = 0x6c0c,
    HostIdtrBase = 0x6c0e,
    HostSysenterEsp = 0x6c10,
    HostSysenterEip = 0x6c12,
    HostRsp = 0x6c14,
    HostRip = 0x6c16,
}

/// The control structure that is current on the calling CPU, as long as this exists. It stays
/// there.
#[derive(Debug)]
pub struct Vmcs(Box<Page>, PhantomData<*mut ()>);

impl Vmcs {
    /// A structure that has not been launched. It becomes current. Its fields have no values yet.
    ///
    /// # Safety
    /// VMX is on, and the calling CPU has no other one: that would not be current any more.
    pub unsafe fn make_current() -> Vmcs {
        let mut region = Page::new();
        region.set_first_word(revision());
        let vmcs = Vmcs(region, PhantomData);
        let has_failed: u8;
        // SAFETY: VMX is on, as the caller promises, and the region is the CPU's until it is
        // cleared again.
        unsafe {
            core::arch::asm!("vmclear [{address}]", "vmptrld [{address}]", "setna {has_failed}",
                address = in(reg) &vmcs.0.address(), has_failed = out(reg_byte) has_failed, options(nostack));
        }
        if has_failed != 0 {
            error!("VMPTRLD failed");
        }
        vmcs
    }

    /// The value of `field`.
    pub fn read(&self, field: Field) -> u64 {
        let (value, has_failed): (u64, u8);
        // SAFETY: reading changes nothing.
        unsafe {
            core::arch::asm!("vmread {value}, {field}", "setna {has_failed}", value = out(reg) value,
                field = in(reg) u64::from(field as u32), has_failed = out(reg_byte) has_failed,
                options(nomem, nostack));
        }
        if has_failed != 0 {
            error!("VMREAD of {field:?} failed");
        }
        value
    }

    /// Sets `field`.
    ///
    /// # Safety
    /// A field of the host has what an exit has to load. An address among the controls is that of
    /// memory for what the CPU does there. Fields of the guest may have any value: it reaches
    /// memory by its page tables alone.
    pub unsafe fn write(&mut self, field: Field, value: u64) {
        let has_failed: u8;
        // SAFETY: as the caller promises.
        unsafe {
            core::arch::asm!("vmwrite {field}, {value}", "setna {has_failed}", value = in(reg) value,
                field = in(reg) u64::from(field as u32), has_failed = out(reg_byte) has_failed,
                options(nomem, nostack));
        }
        if has_failed != 0 {
            error!("VMWRITE of {field:?} failed");
        }
    }

    /// Sets fields.
    ///
    /// # Safety
    /// As for [`write`](Vmcs::write).
    pub unsafe fn write_all(&mut self, values: &[(Field, u64)]) {
        // SAFETY: as the caller promises.
        values.iter().for_each(|&(field, value)| unsafe { self.write(field, value) });
    }
}

impl Drop for Vmcs {
    fn drop(&mut self) {
        // SAFETY: the CPU writes back what it holds of the region, and lets go of it.
        unsafe { core::arch::asm!("vmclear [{}]", in(reg) &self.0.address(), options(nostack)) };
    }
}
