//! How a VM's memory is managed: chosen when it is made, and the same for its life. Any value goes with any other, but for
//! what [`Config::check`] refuses.

use crate::addr::{Level, NodeId, Pfn};
use crate::error::Error;
use crate::format::{Format, Npt};
use crate::host::{Host, TableNode};
use crate::second_stage::age::AccessTracking;
use crate::sync::Locking;

/// How a VM's memory is managed.
///
/// # Example
/// ```
/// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
/// # use host::*;
/// use slat::*;
/// # fn main() -> Result<(), Error> {
/// // For Intel: dirty pages from the CPUs' logs, sixteen pages for each fault.
/// let config = Config::default()
///     .with_dirty_tracking(DirtyTracking::PageModificationLog)
///     .with_fault_around(FaultAround::Pages(16));
/// assert!(Vm::<Heap, Ept>::new(Heap, config).is_ok());
/// // What does not go together is refused.
/// let refused = Vm::<Heap, Npt>::new(Heap, config).err();
/// assert_eq!(refused, Some(Error::NoModificationLog { format: "npt" }));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Config {
    /// The lock around sections that change the tables.
    pub locking: Locking,
    /// How [`Vm::age_range`](crate::Vm::age_range) finds out what the guest has used.
    pub access_tracking: AccessTracking,
    /// How the dirty log finds out what the guest has written.
    pub dirty_tracking: DirtyTracking,
    /// What getting the dirty log does.
    pub manual_protect: ManualProtect,
    /// What the first write to a huge page does in a slot that logs.
    pub huge_page_logging: HugePageLogging,
    /// When the huge pages of a slot that begins to log are split.
    pub huge_page_splitting: HugePageSplitting,
    /// Where the tables are allocated that replace huge pages.
    pub split_table_placement: TablePlacement,
    /// Where the tables are allocated that faults and prefaults need.
    pub fault_table_placement: TablePlacement,
    /// Which neighbours a fault maps along.
    pub fault_around: FaultAround,
    /// Which tables the hardware walks.
    pub paging: Paging,
}

/// Which tables the hardware walks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Paging {
    /// Those of the second stage, behind the guest's own.
    #[default]
    SecondStage,
    /// Shadow tables, which lead from the guest's virtual addresses straight to the host's frames: for hardware that has no
    /// second stage, or has it in use. With the format [`Npt`], and with [`AccessTracking::Faults`], since no
    /// hardware sets the accessed bits of the second stage.
    ///
    /// Whoever else than the guest writes its page tables while it runs (a device, the VMM) does so by
    /// [`Vcpu::write_guest_table`](crate::Vcpu::write_guest_table), or takes the page away meanwhile
    /// ([`Vm::invalidate_range`](crate::Vm::invalidate_range)): nothing else tells that shadow tables have become old.
    Shadow(ShadowPaging),
}

/// How shadow tables are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShadowPaging {
    /// What becomes of them when the guest loads CR3.
    pub strategy: ShadowStrategy,
    /// Roots that each vCPU remembers beside its current one; at most [`MAX_PREVIOUS_ROOTS`].
    pub previous_roots: u8,
    /// Most shadow tables at a time, from [`MIN_SHADOW_PAGES`] to [`MAX_SHADOW_PAGES`]: then those go that are not in use.
    pub max_pages: u32,
}

impl Default for ShadowPaging {
    fn default() -> ShadowPaging {
        ShadowPaging { strategy: ShadowStrategy::RootCache, previous_roots: 3, max_pages: 4096 }
    }
}

/// What becomes of shadow tables when the guest loads CR3 or flushes.
///
/// # What bit 63 of CR3 may keep
/// With `RootCache` and `PcidTagged`, the vCPUs of a VM share tables. A load of CR3 with bit 63 set returns to a PCID that this
/// vCPU has left without a flush. There it may find what *another* vCPU has cached for the PCID meanwhile: an entry as it was
/// while the PCID was not current here, which this vCPU's own CPU could not have cached (Intel SDM vol. 3A, 4.10.2). Each flush
/// by this vCPU of the address, or of the PCID, ends that; so does a page fault at the address.
///
/// A guest notices nothing that flushes, on each vCPU, what has changed since that vCPU left the PCID, at the latest when it
/// returns to it: as Linux does by its `tlb_gen`. For another guest there is `Baseline`. (To synchronize each such load would
/// cost what bit 63 saves: guests use the same few PCIDs on all of their vCPUs.)
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ShadowStrategy {
    /// The root that was current is dropped with all that is reached from it alone, and the next one built anew. Bit 63 of CR3
    /// saves nothing.
    Baseline,
    /// Each vCPU remembers its last roots; a switch to one of them builds nothing, and synchronizes nothing if bit 63 is set.
    /// Tables serve all PCIDs and vCPUs: what one of them may still have cached of an entry that has changed, all may. What INVLPG flushes
    /// is flushed of all remembered roots at once.
    RootCache,
    /// As `RootCache`, but each table belongs to one PCID (of all vCPUs), and what INVLPG flushes of others, too, is done when the
    /// guest switches to them.
    PcidTagged,
}

/// Most roots that a vCPU can remember beside its current one.
pub const MAX_PREVIOUS_ROOTS: u8 = 31;

/// Fewest shadow tables that a VM can do with.
pub const MIN_SHADOW_PAGES: u32 = 64;

/// Most shadow tables that a VM can have.
pub const MAX_SHADOW_PAGES: u32 = 1 << 20;

/// Which neighbours a fault maps along with its page of 4 KiB. Those that the host knows to be resident
/// ([`Host::resolve_resident`]), with what a read would be given; to the dirty log and to CPUs'
/// accessed bits they are pages that nobody has used.
///
/// With [`AccessTracking::Faults`] nothing tells of the first use of a page that is mapped: there neighbours count as used
/// until they are aged. There, and in a format without dirty bits ([`Format::HAS_DIRTY_BIT`]), they are mapped without the
/// right to write, so that they do not count as written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FaultAround {
    /// None.
    #[default]
    Off,
    /// Those in the aligned window of so many pages around the one that faulted: a power of two from 2 to
    /// [`MAX_FAULT_AROUND_PAGES`].
    Pages(u8),
}

/// Most pages in the window of [`FaultAround`].
pub const MAX_FAULT_AROUND_PAGES: u8 = 64;

impl FaultAround {
    /// Pages in the window, the one that faulted among them.
    #[inline]
    pub(crate) fn nr_pages(self) -> u64 {
        match self {
            FaultAround::Off => 1,
            FaultAround::Pages(nr_pages) => u64::from(nr_pages),
        }
    }
}

/// How the dirty log finds out which pages of 4 KiB the guest has written. Huge pages are write-protected in any case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DirtyTracking {
    /// Pages are write-protected, and the first write of each faults.
    WriteProtect(WriteProtection),
    /// By the dirty bits of the leaves, which CPUs set: no write faults, and getting the log looks at each leaf.
    DirtyBit,
    /// CPUs log the pages whose dirty bits they set (Intel SDM vol. 3C, "Page-Modification Logging"), and the host hands
    /// that over ([`Host::drain_modification_logs`]).
    PageModificationLog,
}

impl Default for DirtyTracking {
    fn default() -> DirtyTracking {
        DirtyTracking::WriteProtect(WriteProtection::default())
    }
}

/// How pages are write-protected for the dirty log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WriteProtection {
    /// Where many pages of a 2 MiB block are meant: all 512 at once, by the table entry above them. The first write to the
    /// block afterwards takes the right to write from each of the others. In a format whose table entries have no rights
    /// ([`Format::GENERATION`]), as `LeafByLeaf`.
    #[default]
    Lazy,
    /// Each page by itself.
    LeafByLeaf,
}

/// What [`Vm::get_dirty_log`](crate::Vm::get_dirty_log) does: KVM's `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` and its flags.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ManualProtect {
    /// It takes the log, and writes from then on are logged anew.
    #[default]
    Disabled,
    /// It copies the log; [`Vm::clear_dirty_log`](crate::Vm::clear_dirty_log) begins anew, range by range.
    Enabled,
    /// As `Enabled`, and a slot that begins to log has all of its pages dirty at first. So nothing is write-protected then,
    /// but with each range that is cleared.
    InitiallySet,
}

/// What the first write to a huge page does in a slot that logs. Until then huge pages stay, and reads map new ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HugePageLogging {
    /// It splits the huge page, so that pages of 4 KiB are logged.
    #[default]
    Split,
    /// It marks all pages of the 2 MiB as dirty, and leaves them mapped as one. (A page of 1 GiB is split into those.)
    MarkWhole,
}

/// When the huge pages of a slot that logs are split, if they are to be ([`HugePageLogging`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HugePageSplitting {
    /// Ahead of time, by the thread that turns logging on; with [`ManualProtect::InitiallySet`] by those that clear the log,
    /// range by range. Those for which there is no memory are split as with `Lazy`.
    #[default]
    Eager,
    /// Each by the vCPU that first writes to it.
    Lazy,
}

/// On which node of the host a table is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TablePlacement {
    /// On that of the memory which the table will map: of the huge page that it replaces, or of the page that faulted.
    #[default]
    HugePageNode,
    /// On that of the CPU on which the thread runs that allocates it.
    CallerNode,
    /// Where the memory policy of that thread says.
    CallerPolicy,
    /// On this one.
    Node(NodeId),
}

impl TablePlacement {
    /// What to ask the host for, for a table that will map the memory at `pfn`, if that is known.
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
    /// The default configuration with another locking.
    pub fn with_locking(locking: Locking) -> Config {
        Config { locking, ..Config::default() }
    }

    /// This configuration with another way to find out accesses.
    pub fn with_access_tracking(self, access_tracking: AccessTracking) -> Config {
        Config { access_tracking, ..self }
    }

    /// This configuration with another way to find out writes.
    pub fn with_dirty_tracking(self, dirty_tracking: DirtyTracking) -> Config {
        Config { dirty_tracking, ..self }
    }

    /// This configuration with another way to get the dirty log.
    pub fn with_manual_protect(self, manual_protect: ManualProtect) -> Config {
        Config { manual_protect, ..self }
    }

    /// This configuration with another grain of logging.
    pub fn with_huge_page_logging(self, huge_page_logging: HugePageLogging) -> Config {
        Config { huge_page_logging, ..self }
    }

    /// This configuration with another time of splitting.
    pub fn with_huge_page_splitting(self, huge_page_splitting: HugePageSplitting) -> Config {
        Config { huge_page_splitting, ..self }
    }

    /// This configuration with the tables that replace huge pages elsewhere.
    pub fn with_split_table_placement(self, split_table_placement: TablePlacement) -> Config {
        Config { split_table_placement, ..self }
    }

    /// This configuration with the tables of faults elsewhere.
    pub fn with_fault_table_placement(self, fault_table_placement: TablePlacement) -> Config {
        Config { fault_table_placement, ..self }
    }

    /// This configuration with other neighbours that faults map along.
    pub fn with_fault_around(self, fault_around: FaultAround) -> Config {
        Config { fault_around, ..self }
    }

    /// This configuration with other tables for the hardware. Shadow tables come with [`AccessTracking::Faults`].
    pub fn with_paging(self, paging: Paging) -> Config {
        match paging {
            Paging::SecondStage => Config { paging, ..self },
            Paging::Shadow(_) => Config { paging, access_tracking: AccessTracking::Faults, ..self },
        }
    }

    /// Whether tables of format `F` can be managed like this.
    pub(crate) fn check<F: Format>(&self) -> Result<(), Error> {
        if let Paging::Shadow(ShadowPaging { previous_roots, max_pages, .. }) = self.paging {
            if F::NAME != Npt::NAME {
                return Err(Error::NoShadowPaging { format: F::NAME });
            }
            if self.access_tracking != AccessTracking::Faults {
                return Err(Error::ShadowNeedsFaults);
            }
            if previous_roots > MAX_PREVIOUS_ROOTS {
                return Err(Error::TooManyRoots { previous_roots });
            }
            if !(MIN_SHADOW_PAGES..=MAX_SHADOW_PAGES).contains(&max_pages) {
                return Err(Error::BadShadowPages { max_pages });
            }
        }
        if let FaultAround::Pages(nr_pages) = self.fault_around {
            if !(nr_pages.is_power_of_two() && (2..=MAX_FAULT_AROUND_PAGES).contains(&nr_pages)) {
                return Err(Error::BadFaultAround { nr_pages });
            }
        }
        let needs_dirty_bit = match self.dirty_tracking {
            DirtyTracking::WriteProtect(_) => false,
            DirtyTracking::DirtyBit => true,
            DirtyTracking::PageModificationLog if F::HAS_MODIFICATION_LOG => true,
            DirtyTracking::PageModificationLog => return Err(Error::NoModificationLog { format: F::NAME }),
        };
        if needs_dirty_bit && !F::HAS_DIRTY_BIT {
            return Err(Error::NoDirtyBitInFormat { format: F::NAME });
        }
        if needs_dirty_bit && self.access_tracking == AccessTracking::Faults {
            return Err(Error::NoDirtyBit);
        }
        Ok(())
    }

    /// Whether the first write to a leaf of `level` in a slot that logs is to fault, so that it is seen.
    #[inline]
    pub(crate) fn first_write_faults(&self, level: Level) -> bool {
        level > Level::L4K || matches!(self.dirty_tracking, DirtyTracking::WriteProtect(_))
    }

    /// The largest leaf that may be written in a slot that logs.
    #[inline]
    pub(crate) fn largest_logged_write(&self) -> Level {
        match self.huge_page_logging {
            HugePageLogging::Split => Level::L4K,
            HugePageLogging::MarkWhole => Level::L2M,
        }
    }
}
