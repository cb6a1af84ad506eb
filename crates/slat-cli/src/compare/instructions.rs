//! Instructions of faults, log and invalidation beside KVM's, counted on an emulated machine
//! (docs/instructions.md).
//!
//! slat's are counted in each run. KVM's are those that an earlier `slat metal --guest measure` has
//! saved, of the same emulator and kernel: to boot a Linux takes longer than all else here.

use super::comparison::{Comparison, EMULATED, Side};
use super::systems::{BETTER, Plan, Planned};
use crate::metal::EVENTS;
use crate::results::compared::Role;

/// Events for which slat does not claim fewer instructions than KVM: a write does what the call over
/// its 2 MiB has put off.
const UNCLAIMED: [&str; 2] = ["write_protect_fault_first", "write_fault_2m"];

pub(super) fn plan() -> Plan {
    let side = |name: &str, role, system, variant| {
        Side::new(name, role, &[("system", system), ("variant", variant)]).measured_on(EMULATED)
    };
    // A title that is indented goes on from that of the event above.
    let mut above = "";
    let comparisons = EVENTS.iter().map(|&(event, title)| {
        let title = match title.strip_prefix("  ") {
            Some(rest) => format!("{above}: {rest}"),
            None => {
                above = title;
                title.to_owned()
            }
        };
        let claim = (!UNCLAIMED.contains(&event)).then_some(BETTER);
        Comparison {
            name: format!("instructions_{event}"),
            title,
            experiment: 0,
            figure: event,
            labels: Vec::new(),
            published: None,
            sides: vec![
                side("slat (protects lazily)", Role::Slat, "slat", "lazy"),
                side("slat (protects leaf by leaf)", Role::Baseline, "slat", "leaves"),
                Side { claim, ..side("KVM, TDP MMU", Role::Peer, "kvm", "tdp") },
                side("KVM, shadow MMU", Role::Peer, "kvm", "shadow"),
            ],
        }
    });
    Plan {
        system: "instructions",
        title: "Instructions beside KVM",
        published_note: "nothing. The same guest runs on slat as a hypervisor and on Linux's KVM, on one emulated CPU with nested \
                         paging. KVM's counts are those that `slat metal --guest measure` has saved, on the same emulator.",
        comparisons: comparisons.collect(),
        experiments: vec![Planned::new("slat metal --guest measure")],
    }
}
