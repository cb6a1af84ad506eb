//! The configuration of a VM, fixed when the VM is created. All combinations are allowed, except
//! those that [`Config::check`] refuses.

use crate::addr::{Level, NodeId, Pfn};
use crate::error::ConfigError;
use crate::format::{Format, Hardware};
use crate::host::{Host, TableNode};
#[cfg(feature = "baselines")]
use crate::sync::Locking;

/// How a VM's memory is managed. It is fixed when the VM is created.
///
/// `Config::default()` suits every CPU, except one that walks EPT without accessed bits
/// ([`AccessTracking::Faults`]). Each field below says its default. [`Vm::new`](crate::Vm::new)
/// refuses a configuration that the CPUs of the format cannot have, with an error that names the
/// reason.
///
/// # Example
/// ```
/// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
/// # use host::*;
/// use slat::*;
/// use slat::dirty::*;
/// use slat::error::*;
/// use slat::format::*;
/// use slat::tables::*;
/// # fn main() -> Result<(), Error> {
/// // For Intel: dirty pages from the CPUs' logs, sixteen pages for each fault.
/// let config = Config::default()
///     .with_dirty_tracking(DirtyTracking::PageModificationLog)
///     .with_fault_around(FaultAround::Pages(16));
/// assert!(Vm::<Heap, Ept>::new(Heap, config).is_ok());
/// // An unsupported combination is refused.
/// let refused = Vm::<Heap, Npt>::new(Heap, config).err();
/// assert_eq!(refused, Some(ConfigError::NoModificationLog { format: "npt" }));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Config {
    /// The lock around guards that change the page tables.
    #[cfg(feature = "baselines")]
    pub locking: Locking,
    /// How [`Vm::age_range`](crate::Vm::age_range) finds the pages that the guest has used.
    /// Default: [`AccessTracking::AccessedBit`].
    pub access_tracking: AccessTracking,
    /// How the dirty log finds the pages that the guest has written. Default:
    /// [`DirtyTracking::WriteProtect`].
    pub dirty_tracking: DirtyTracking,
    /// Whether getting the dirty log also begins a new one. Default: [`ManualProtect::Disabled`],
    /// so it does.
    pub manual_protect: ManualProtect,
    /// What becomes of huge pages in a memslot that logs. Default: [`HugePageLogging::Split`].
    pub huge_page_logging: HugePageLogging,
    /// Where page-table pages are allocated. Default: [`TablePlacement::HugePageNode`].
    pub table_placement: TablePlacement,
    /// Which neighbours a fault also maps. Default: [`FaultAround::Off`].
    pub fault_around: FaultAround,
    /// What the CPUs have, as far as page tables depend on it: levels, memory types, execution.
    /// Default: what every CPU of the format has.
    pub hardware: Hardware,
}

/// How accesses of the guest are found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AccessTracking {
    /// By the accessed bit of the leaves. A CPU may fault where the bit is clear, instead of
    /// setting it (Arm with VTCR_EL2.HA clear, RISC-V with Svade): the fault sets it. On EPT it
    /// must be on.
    #[default]
    AccessedBit,
    /// By faults: for CPUs that do not set accessed bits (EPT with the EPTP's bit 6 clear, Intel
    /// SDM vol. 3C, "Accessed and Dirty Flags for EPT"; Arm without FEAT_HAFDBS; RISC-V with
    /// Svade).
    Faults,
}

impl AccessTracking {
    /// Whether nothing records a write through a leaf that has W: CPUs set no dirty bits in format
    /// `F`. Such a leaf counts as dirty from the beginning.
    #[inline]
    pub(crate) fn writes_are_unseen<F: Format>(self) -> bool {
        self == AccessTracking::Faults || !F::HAS_DIRTY_BIT
    }
}

/// How shadow page tables are kept ([`Vm::with_shadow_paging`](crate::Vm::with_shadow_paging)). The
/// default is [`ShadowStrategy::RootCache`] with 3 previous roots and 4096 pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShadowPaging {
    /// What happens to them when the guest loads CR3.
    pub strategy: ShadowStrategy,
    /// Number of roots that each vCPU remembers besides its current one; at most
    /// [`MAX_PREVIOUS_ROOTS`](ShadowPaging::MAX_PREVIOUS_ROOTS).
    pub previous_roots: u8,
    /// Largest number of shadow pages, from [`MIN_PAGES`](ShadowPaging::MIN_PAGES) to
    /// [`MAX_PAGES`](ShadowPaging::MAX_PAGES). Beyond
    /// it, pages that are not in use are evicted.
    pub max_pages: u32,
}

impl ShadowPaging {
    /// Largest number of roots that a vCPU can remember besides its current one.
    pub const MAX_PREVIOUS_ROOTS: u8 = 31;
    /// Smallest limit for the shadow pages of a VM.
    pub const MIN_PAGES: u32 = 64;
    /// Largest limit for the shadow pages of a VM.
    pub const MAX_PAGES: u32 = 1 << 20;
}

impl Default for ShadowPaging {
    fn default() -> ShadowPaging {
        ShadowPaging { strategy: ShadowStrategy::RootCache, previous_roots: 3, max_pages: 4096 }
    }
}

impl ShadowPaging {
    pub(crate) fn check(self) -> Result<(), ConfigError> {
        let ShadowPaging { previous_roots, max_pages, .. } = self;
        if previous_roots > ShadowPaging::MAX_PREVIOUS_ROOTS {
            return Err(ConfigError::TooManyRoots { previous_roots });
        }
        if !(ShadowPaging::MIN_PAGES..=ShadowPaging::MAX_PAGES).contains(&max_pages) {
            return Err(ConfigError::BadShadowPages { max_pages });
        }
        Ok(())
    }
}

/// What happens to shadow page tables when the guest loads CR3 or flushes.
///
/// # What bit 63 of CR3 may keep
/// With all strategies but `Baseline`, the vCPUs of a VM share shadow pages and keep them in use. A
/// load of CR3 with bit 63 set returns to a PCID that this vCPU has left without a flush. There it
/// may find a translation that *another* vCPU has cached for the PCID since: a PTE as it was while
/// the PCID was not current here. This vCPU's own CPU could not have cached it (Intel SDM vol. 3A,
/// 4.10.2). It lasts until this vCPU flushes the address or the PCID, or takes a page fault at the
/// address.
///
/// A guest does not notice if each of its vCPUs flushes, at the latest on its return to a PCID,
/// what has changed since it left. Linux does so by its `tlb_gen`. Other guests
/// need `Baseline` (feature `baselines`). (Synchronizing each such load would cost what bit 63
/// saves: guests use the same few PCIDs on all of their vCPUs.)
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ShadowStrategy {
    /// As KVM did until 2018. A load of CR3 gives up the root of the vCPU. The next entry finds the
    /// page of the new root by frame and role, synchronizes what is unsync below it, and flushes
    /// the TLB. Shadow pages stay until they are zapped or evicted. Bit 63 of CR3 saves nothing.
    ///
    /// If the VM has a lock ([`Config::locking`]), it is held for all of this, and by each call
    /// that changes shadow page tables. It is held exclusively, and where the host allocates and
    /// flushes, too: neither may call the VM.
    #[cfg(feature = "baselines")]
    Baseline,
    /// Each vCPU remembers its last roots. A switch to one of them builds nothing, and synchronizes
    /// nothing if bit 63 is set.
    ///
    /// Shadow pages serve all PCIDs and vCPUs: if a changed PTE may still be cached for one of
    /// them, it may be for all. INVLPG flushes the address in all remembered roots at once.
    RootCache,
    /// As `RootCache`, but a root is searched for by its PCID: a vCPU remembers one for each of the
    /// last 32 PCIDs, whatever [`previous_roots`](ShadowPaging::previous_roots) says. INVPCID is
    /// carried out at once on the root of the PCID that it names. What another PCID leaves in shared
    /// shadow pages after that lasts as the translations of other vCPUs do.
    #[cfg(feature = "baselines")]
    RootsByPcid,
    /// As `RootCache`, but each shadow page belongs to one PCID (of all vCPUs). What INVLPG flushes
    /// in other roots, too, is done when the guest switches to them.
    PcidTagged,
}

impl ShadowStrategy {
    /// Whether a load of CR3 gives the root up.
    #[inline]
    pub(crate) fn keeps_no_root(self) -> bool {
        match self {
            #[cfg(feature = "baselines")]
            ShadowStrategy::Baseline => true,
            _ => false,
        }
    }

    /// Whether a vCPU searches for a root by its PCID alone.
    #[inline]
    pub(crate) fn searches_by_pcid(self) -> bool {
        match self {
            #[cfg(feature = "baselines")]
            ShadowStrategy::RootsByPcid => true,
            _ => false,
        }
    }
}

/// Which neighbours a fault maps together with its page of 4 KiB. These are pages that the host
/// knows to be resident ([`Host::resolve_resident`]), mapped as a read would map them. For the
/// dirty log and CPUs' accessed bits they are not used.
///
/// With [`AccessTracking::Faults`] the first use of a mapped page cannot be observed, so neighbours
/// count as used until they are aged. There, and in a format without dirty bits
/// ([`Format::HAS_DIRTY_BIT`]), they are mapped without the right to write, so that they do not
/// count as written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FaultAround {
    /// None.
    #[default]
    Off,
    /// Those in the aligned window of so many pages around the page that faulted: a power of two
    /// from 2 to [`MAX_PAGES`](FaultAround::MAX_PAGES).
    Pages(u8),
}

impl FaultAround {
    /// Largest window in pages.
    pub const MAX_PAGES: u8 = 64;

    /// Pages in the window, with the one that faulted.
    #[inline]
    pub(crate) fn nr_pages(self) -> u64 {
        match self {
            FaultAround::Off => 1,
            FaultAround::Pages(nr_pages) => u64::from(nr_pages),
        }
    }
}

/// How the dirty log finds the pages of 4 KiB that the guest has written. Huge pages are
/// write-protected in any case.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DirtyTracking {
    /// Pages are write-protected, and the first write to each faults.
    ///
    /// If many pages of a 2 MiB block are protected, this is done lazily, by the directory entry
    /// above: it protects all 512 at once. The next write to the block then write-protects each of
    /// the others. In a format whose directory entries have no rights ([`Format::GENERATION`] is
    /// 0), as `WriteProtectLeaves`.
    #[default]
    WriteProtect,
    /// As `WriteProtect`, each page by its own leaf.
    WriteProtectLeaves,
    /// By the dirty bits of the leaves, which CPUs set. No write faults, but getting the log reads
    /// each leaf.
    DirtyBit,
    /// CPUs log the pages whose dirty bits they set (Intel SDM vol. 3C, "Page-Modification
    /// Logging"), and the host passes these logs on ([`Host::drain_modification_logs`]).
    PageModificationLog,
}

impl DirtyTracking {
    /// Whether pages are write-protected.
    #[inline]
    pub fn write_protects(self) -> bool {
        matches!(self, DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves)
    }
}

/// Whether [`Vm::get_dirty_log`](crate::Vm::get_dirty_log) also begins a new log: KVM's
/// `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` and its flags.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ManualProtect {
    /// It takes the log, and later writes are logged anew.
    #[default]
    Disabled,
    /// It copies the log. [`Vm::clear_dirty_log`](crate::Vm::clear_dirty_log) logs anew, range by
    /// range.
    Enabled,
    /// As `Enabled`, and all pages of a memslot that begins to log are dirty at first. So nothing
    /// is write-protected then, but only with each range that is cleared.
    InitiallySet,
}

/// What becomes of huge pages in a memslot that logs: the largest page that the guest may write
/// there, and when larger ones are split. Until then huge pages stay, and reads map new ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HugePageLogging {
    /// Huge pages are split, so that pages of 4 KiB are logged. This is done ahead of time, by the
    /// thread that turns logging on. With [`ManualProtect::InitiallySet`], by those that clear the
    /// log, range by range. Without memory for it, a huge page is split as with `SplitLazily`.
    #[default]
    Split,
    /// As `Split`, each by the vCPU that first writes to it.
    SplitLazily,
    /// Pages of 2 MiB stay: the first write to one marks all of its pages as dirty. Pages of 1 GiB
    /// are split into them, when `Split` would split them.
    MarkWhole,
    /// As `MarkWhole`, pages of 1 GiB each by the vCPU that first writes to it.
    MarkWholeLazily,
}

impl HugePageLogging {
    /// Whether huge pages are split ahead of time.
    #[inline]
    pub fn splits_eagerly(self) -> bool {
        matches!(self, HugePageLogging::Split | HugePageLogging::MarkWhole)
    }

    /// Whether pages of 2 MiB stay.
    #[inline]
    pub fn marks_whole(self) -> bool {
        matches!(self, HugePageLogging::MarkWhole | HugePageLogging::MarkWholeLazily)
    }
}

/// On which node of the host a page-table page is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TablePlacement {
    /// On the node of the memory that it will map: of the huge page that it replaces, or of the
    /// page that faulted. The root, which maps all, is on the node of the CPU that makes the VM.
    #[default]
    HugePageNode,
    /// On the node of the CPU that runs the allocating thread.
    CallerNode,
    /// Where the memory policy of that thread says.
    CallerPolicy,
    /// On this node.
    Node(NodeId),
}

impl TablePlacement {
    /// The node to request from the host for a page-table page that will map the memory at `pfn`,
    /// if that is known.
    pub(crate) fn node_for<H: Host>(self, host: &H, pfn: Option<Pfn>) -> TableNode {
        match (self, pfn) {
            (TablePlacement::HugePageNode, Some(pfn)) => TableNode::Node(host.node_of(pfn)),
            (TablePlacement::HugePageNode, None) | (TablePlacement::CallerNode, _) => TableNode::Caller,
            (TablePlacement::CallerPolicy, _) => TableNode::CallerPolicy,
            (TablePlacement::Node(node), _) => TableNode::Node(node),
        }
    }
}

impl Config {
    /// This configuration with `locking`.
    #[cfg(feature = "baselines")]
    pub fn with_locking(self, locking: Locking) -> Config {
        Config { locking, ..self }
    }

    /// This configuration with `access_tracking`.
    pub fn with_access_tracking(self, access_tracking: AccessTracking) -> Config {
        Config { access_tracking, ..self }
    }

    /// This configuration with `dirty_tracking`.
    pub fn with_dirty_tracking(self, dirty_tracking: DirtyTracking) -> Config {
        Config { dirty_tracking, ..self }
    }

    /// This configuration with `manual_protect`.
    pub fn with_manual_protect(self, manual_protect: ManualProtect) -> Config {
        Config { manual_protect, ..self }
    }

    /// This configuration with `huge_page_logging`.
    pub fn with_huge_page_logging(self, huge_page_logging: HugePageLogging) -> Config {
        Config { huge_page_logging, ..self }
    }

    /// This configuration with `table_placement`.
    pub fn with_table_placement(self, table_placement: TablePlacement) -> Config {
        Config { table_placement, ..self }
    }

    /// This configuration with `fault_around`.
    pub fn with_fault_around(self, fault_around: FaultAround) -> Config {
        Config { fault_around, ..self }
    }

    /// This configuration with `hardware`.
    pub fn with_hardware(self, hardware: Hardware) -> Config {
        Config { hardware, ..self }
    }

    /// Checks that page tables of format `F` support this configuration.
    pub(crate) fn check<F: Format>(&self) -> Result<(), ConfigError> {
        if let FaultAround::Pages(nr_pages) = self.fault_around {
            if !(nr_pages.is_power_of_two() && (2..=FaultAround::MAX_PAGES).contains(&nr_pages)) {
                return Err(ConfigError::BadFaultAround { nr_pages });
            }
        }
        let needs_dirty_bit = match self.dirty_tracking {
            DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves => false,
            DirtyTracking::DirtyBit => true,
            DirtyTracking::PageModificationLog if F::HAS_MODIFICATION_LOG => true,
            DirtyTracking::PageModificationLog => return Err(ConfigError::NoModificationLog { format: F::NAME }),
        };
        if needs_dirty_bit && !F::HAS_DIRTY_BIT {
            return Err(ConfigError::NoDirtyBitInFormat { format: F::NAME });
        }
        if needs_dirty_bit && self.access_tracking == AccessTracking::Faults {
            return Err(ConfigError::NoDirtyBit);
        }
        Ok(())
    }

    /// Whether the first write to a leaf of `level` in a memslot that logs must fault to be
    /// observed.
    #[inline]
    pub(crate) fn first_write_faults(&self, level: Level) -> bool {
        level > Level::L4K || self.dirty_tracking.write_protects()
    }

    /// The largest leaf that may be written in a memslot that logs.
    #[inline]
    pub(crate) fn largest_logged_write(&self) -> Level {
        if self.huge_page_logging.marks_whole() { Level::L2M } else { Level::L4K }
    }
}
