//! A VM with shadow paging. Its calls are those of any VM; `vcpu/shadow.rs` has those of its vCPUs.

use super::Vm;
use crate::config::{AccessTracking, Config, ShadowPaging};
use crate::dirty::rings::Rings;
use crate::error::ConfigError;
use crate::format::Npt;
use crate::host::Host;
use crate::shadow::Shadow;
use crate::slot::set::Slots;
use crate::table::Tree;

impl<H: Host> Vm<H, Npt> {
    /// Creates a VM without memory, whose hardware walks shadow page tables. They translate the
    /// guest's virtual addresses to the host's frames. They are for hardware that has no second
    /// stage, or that uses it already.
    ///
    /// Accesses are tracked by faults ([`AccessTracking::Faults`]) whatever `config` says, since no
    /// hardware sets the accessed bits of the second stage.
    ///
    /// While the guest runs, only the guest may write its page tables directly. A device or the VMM
    /// writes them by [`Vcpu::write_guest_table`](crate::Vcpu::write_guest_table), or invalidates
    /// the page for the time of the write ([`Vm::invalidate_range`]). Otherwise shadow page tables
    /// become stale.
    ///
    /// # Errors
    /// Those of [`Vm::new`], [`ConfigError::TooManyRoots`], [`ConfigError::BadShadowPages`].
    pub fn with_shadow_paging(host: H, config: Config, shadow: ShadowPaging) -> Result<Vm<H, Npt>, ConfigError> {
        let config = config.with_access_tracking(AccessTracking::Faults);
        config.check::<Npt>()?;
        shadow.check()?;
        let tree = Tree::new(host, config, Some(Shadow::new(shadow)?))?;
        Ok(Vm { slots: Slots::new(&tree.epochs)?, tree, rings: Rings::new() })
    }
}
