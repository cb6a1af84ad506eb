//! The guest's device tree (Devicetree Specification 0.4; Linux,
//! Documentation/devicetree/bindings/riscv).

use alloc::format;
use alloc::vec::Vec;

use dtoolkit::model::DeviceTreeNode;

use crate::arch::riscv::{boot, clock};
use crate::boot::Span;
use crate::linux::tree::{self, flag, is, node, reg};
use crate::options::Options;

/// What the guest may use of each CPU: the hypervisor saves and restores these, or they have no
/// state.
const EXTENSIONS: [&str; 10] = ["i", "m", "a", "f", "d", "c", "zicntr", "zicsr", "zifencei", "sstc"];
const ISA: &str = "rv64imafdc_zicntr_zicsr_zifencei_sstc";

/// The tree of a guest as `options` say, with `memory`, whose kernel has the command line
/// `command_line` and the initramfs at `initramfs`.
pub(super) fn build(options: &Options, command_line: &str, memory: Span, initramfs: Span) -> Vec<u8> {
    let mut tree = tree::with_memory([is("compatible", "slat,guest")], command_line, memory, initramfs);
    let root = &mut tree.root;
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
            [is("compatible", "ns16550a"), is("reg", reg(&[uart])), is("clock-frequency", hz as u32)],
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
