//! The guest's device tree (Devicetree Specification 0.4; Linux,
//! Documentation/devicetree/bindings/riscv).

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use dtoolkit::ToPropertyValue;
use dtoolkit::model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty};

use crate::arch::riscv::{boot, clock};
use crate::boot::Span;
use crate::options::Options;

/// What the guest may use of each CPU: the hypervisor saves and restores these, or they have no
/// state.
const EXTENSIONS: [&str; 10] = ["i", "m", "a", "f", "d", "c", "zicntr", "zicsr", "zifencei", "sstc"];
const ISA: &str = "rv64imafdc_zicntr_zicsr_zifencei_sstc";

/// A node with properties.
fn node<const N: usize>(name: impl Into<String>, properties: [DeviceTreeProperty; N]) -> DeviceTreeNode {
    let mut node = DeviceTreeNode::new_unchecked(name);
    properties.into_iter().for_each(|property| node.add_property(property));
    node
}

fn is(name: &str, value: impl ToPropertyValue) -> DeviceTreeProperty {
    DeviceTreeProperty::new_unchecked(name, value)
}

/// A property without a value.
fn flag(name: &str) -> DeviceTreeProperty {
    is(name, &[][..] as &[u8])
}

/// Addresses and sizes of two cells.
fn range(span: Span) -> Vec<u32> {
    [span.start, span.size_bytes()].iter().flat_map(|number| [(number >> 32) as u32, *number as u32]).collect()
}

/// The tree of a guest as `options` say, with `memory`, whose kernel has the command line
/// `command_line` and the initramfs at `initramfs`.
pub(super) fn build(options: &Options, command_line: &str, memory: Span, initramfs: Span) -> Vec<u8> {
    let mut tree = DeviceTree::new();
    let root = &mut tree.root;
    for property in
        [is("#address-cells", 2_u32), is("#size-cells", 2_u32), is("compatible", "slat,guest"), is("model", "slat")]
    {
        root.add_property(property);
    }
    root.add_child(node(
        "chosen",
        [
            is("bootargs", command_line),
            is("linux,initrd-start", initramfs.start),
            is("linux,initrd-end", initramfs.end),
        ],
    ));
    root.add_child(node(format!("memory@{:x}", memory.start), [is("device_type", "memory"), is("reg", range(memory))]));
    let mut cpus = node(
        "cpus",
        [is("#address-cells", 1_u32), is("#size-cells", 0_u32), is("timebase-frequency", clock::frequency_hz() as u32)],
    );
    (0..options.nr_cpus as u32).for_each(|number| cpus.add_child(cpu(number)));
    root.add_child(cpus);
    if let Some((uart, hz)) = boot::uart() {
        let mut soc = node(
            "soc",
            [is("#address-cells", 2_u32), is("#size-cells", 2_u32), is("compatible", "simple-bus"), flag("ranges")],
        );
        soc.add_child(node(
            format!("serial@{:x}", uart.start),
            [is("compatible", "ns16550a"), is("reg", range(uart)), is("clock-frequency", hz as u32)],
        ));
        root.add_child(soc);
    }
    tree.to_dtb()
}

fn cpu(number: u32) -> DeviceTreeNode {
    let mut cpu = node(
        format!("cpu@{number:x}"),
        [
            is("device_type", "cpu"),
            is("reg", number),
            is("status", "okay"),
            is("compatible", "riscv"),
            is("riscv,isa", ISA),
            is("riscv,isa-base", "rv64i"),
            is("riscv,isa-extensions", &EXTENSIONS[..]),
            is("mmu-type", "riscv,sv48"),
        ],
    );
    cpu.add_child(node(
        "interrupt-controller",
        [
            is("#interrupt-cells", 1_u32),
            flag("interrupt-controller"),
            is("compatible", "riscv,cpu-intc"),
            is("phandle", number + 1),
        ],
    ));
    cpu
}
