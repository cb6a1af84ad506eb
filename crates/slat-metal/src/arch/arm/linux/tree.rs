//! The device tree of the guest: what it has of the machine, and nothing else.

use alloc::format;
use alloc::vec::Vec;

use dtoolkit::model::DeviceTreeNode;

use crate::arch::arm::machine::{DISTRIBUTOR_BYTES, Machine};
use crate::boot::Span;
use crate::linux::tree::{self, flag, is, node, reg};

/// Numbers by which nodes refer to each other.
const GIC: u32 = 1;
const CLOCK: u32 = 2;

/// The clock of the serial line in Hz: it matters to none.
const CLOCK_HZ: u32 = 24_000_000;

/// The tree of a guest with `cpus` and the memory `ram`, whose kernel has `command_line` and
/// `initramfs`.
pub(super) fn guest_tree(
    machine: &Machine,
    redistributors: Span,
    cpus: &[u64],
    ram: Span,
    command_line: &str,
    initramfs: Span,
) -> Vec<u8> {
    let serial = format!("pl011@{:x}", machine.serial.start);
    let root = [is("compatible", "linux,dummy-virt"), is("interrupt-parent", GIC)];
    let mut tree = tree::with_memory(root, command_line, ram, initramfs);
    if let Some(chosen) = tree.root.child_mut("chosen") {
        chosen.add_property(is("stdout-path", format!("/{serial}").as_str()));
    }
    let mut add = |node: DeviceTreeNode| tree.root.add_child(node);
    let mut all = node("cpus", [is("#address-cells", 2_u32), is("#size-cells", 0_u32)]);
    for &mpidr in cpus {
        all.add_child(node(
            format!("cpu@{mpidr:x}"),
            [is("device_type", "cpu"), is("compatible", "arm,armv8"), is("reg", mpidr), is("enable-method", "psci")],
        ));
    }
    add(all);
    add(node("psci", [is("compatible", &["arm,psci-1.0", "arm,psci-0.2"][..]), is("method", "hvc")]));
    add(node(
        "timer",
        [is("compatible", "arm,armv8-timer"), is("interrupts", &machine.timer_interrupts[..]), flag("always-on")],
    ));
    let distributor = Span { start: machine.distributor.start, end: machine.distributor.start + DISTRIBUTOR_BYTES };
    add(node(
        format!("interrupt-controller@{:x}", distributor.start),
        [
            is("compatible", "arm,gic-v3"),
            is("reg", reg(&[distributor, redistributors])),
            is("#interrupt-cells", 3_u32),
            is("#address-cells", 2_u32),
            is("#size-cells", 2_u32),
            flag("interrupt-controller"),
            is("phandle", GIC),
        ],
    ));
    add(node(
        "clock",
        [
            is("compatible", "fixed-clock"),
            is("#clock-cells", 0_u32),
            is("clock-frequency", CLOCK_HZ),
            is("phandle", CLOCK),
        ],
    ));
    add(node(
        serial,
        [
            is("compatible", &["arm,pl011", "arm,primecell"][..]),
            is("reg", reg(&[machine.serial])),
            is("interrupts", &machine.serial_interrupt[..]),
            is("clocks", &[CLOCK, CLOCK][..]),
            is("clock-names", &["uartclk", "apb_pclk"][..]),
        ],
    ));
    tree.to_dtb()
}
