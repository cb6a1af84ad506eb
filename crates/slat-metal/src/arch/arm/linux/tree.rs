//! The device tree of the guest: what it has of the machine, and nothing else.

use alloc::format;
use alloc::vec::Vec;

use dtoolkit::error::ModelError;
use dtoolkit::model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty};

use crate::arch::arm::machine::{DISTRIBUTOR_BYTES, Machine};
use crate::boot::Span;
use crate::error;

/// Numbers by which nodes refer to each other.
const GIC: u32 = 1;
const CLOCK: u32 = 2;

/// The clock of the serial line in Hz: it matters to none.
const CLOCK_HZ: u32 = 24_000_000;

/// Addresses and sizes have two cells each.
fn reg(spans: &[Span]) -> Vec<u32> {
    let halves = |value: u64| [(value >> 32) as u32, value as u32];
    spans.iter().flat_map(|span| [halves(span.start), halves(span.size_bytes())].concat()).collect()
}

/// A node, part by part.
struct Builder(DeviceTreeNode);

impl Builder {
    fn new(name: &str) -> Result<Builder, ModelError> {
        Ok(Builder(DeviceTreeNode::new(name)?))
    }

    fn text(mut self, name: &str, value: &str) -> Result<Builder, ModelError> {
        self.0.add_property(DeviceTreeProperty::new(name, value)?);
        Ok(self)
    }

    fn texts(mut self, name: &str, values: &[&str]) -> Result<Builder, ModelError> {
        self.0.add_property(DeviceTreeProperty::new(name, values)?);
        Ok(self)
    }

    fn cells(mut self, name: &str, values: &[u32]) -> Result<Builder, ModelError> {
        self.0.add_property(DeviceTreeProperty::new(name, values)?);
        Ok(self)
    }

    fn number(mut self, name: &str, value: u64) -> Result<Builder, ModelError> {
        self.0.add_property(DeviceTreeProperty::new(name, value)?);
        Ok(self)
    }
}

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
    make(machine, redistributors, cpus, ram, command_line, initramfs)
        .unwrap_or_else(|error| error!("no device tree for the guest: {error}"))
}

fn make(
    machine: &Machine,
    redistributors: Span,
    cpus: &[u64],
    ram: Span,
    command_line: &str,
    initramfs: Span,
) -> Result<Vec<u8>, ModelError> {
    let serial = format!("/pl011@{:x}", machine.serial.start);
    let mut tree = DeviceTree::new();
    let root = Builder::new("")?
        .text("compatible", "linux,dummy-virt")?
        .text("model", "slat")?
        .cells("#address-cells", &[2])?
        .cells("#size-cells", &[2])?
        .cells("interrupt-parent", &[GIC])?;
    tree.root = root.0;
    let mut add = |node: Builder| tree.root.add_child(node.0);
    add(Builder::new("chosen")?
        .text("bootargs", command_line)?
        .text("stdout-path", &serial)?
        .number("linux,initrd-start", initramfs.start)?
        .number("linux,initrd-end", initramfs.end)?);
    add(Builder::new(&format!("memory@{:x}", ram.start))?.text("device_type", "memory")?.cells("reg", &reg(&[ram]))?);
    let mut all = Builder::new("cpus")?.cells("#address-cells", &[2])?.cells("#size-cells", &[0])?;
    for &mpidr in cpus {
        let cpu = Builder::new(&format!("cpu@{mpidr:x}"))?
            .text("device_type", "cpu")?
            .text("compatible", "arm,armv8")?
            .number("reg", mpidr)?
            .text("enable-method", "psci")?;
        all.0.add_child(cpu.0);
    }
    add(all);
    add(Builder::new("psci")?.texts("compatible", &["arm,psci-1.0", "arm,psci-0.2"])?.text("method", "hvc")?);
    add(Builder::new("timer")?
        .text("compatible", "arm,armv8-timer")?
        .cells("interrupts", &machine.timer_interrupts)?
        .cells("always-on", &[])?);
    let distributor = Span { start: machine.distributor.start, end: machine.distributor.start + DISTRIBUTOR_BYTES };
    add(Builder::new(&format!("interrupt-controller@{:x}", distributor.start))?
        .text("compatible", "arm,gic-v3")?
        .cells("reg", &reg(&[distributor, redistributors]))?
        .cells("#interrupt-cells", &[3])?
        .cells("#address-cells", &[2])?
        .cells("#size-cells", &[2])?
        .cells("interrupt-controller", &[])?
        .cells("phandle", &[GIC])?);
    add(Builder::new("clock")?
        .text("compatible", "fixed-clock")?
        .cells("#clock-cells", &[0])?
        .cells("clock-frequency", &[CLOCK_HZ])?
        .cells("phandle", &[CLOCK])?);
    add(Builder::new(serial.trim_start_matches('/'))?
        .texts("compatible", &["arm,pl011", "arm,primecell"])?
        .cells("reg", &reg(&[machine.serial]))?
        .cells("interrupts", &machine.serial_interrupt)?
        .cells("clocks", &[CLOCK, CLOCK])?
        .texts("clock-names", &["uartclk", "apb_pclk"])?);
    Ok(tree.to_dtb())
}
