//! Parts of the device tree of a guest that all machines without a firmware's tables have
//! (Devicetree Specification 0.4). Numbers of addresses and sizes have two cells.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use dtoolkit::ToPropertyValue;
use dtoolkit::model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty};

use crate::boot::Span;

/// A node with properties. All names are the image's own, and valid.
pub(crate) fn node<const N: usize>(name: impl Into<String>, properties: [DeviceTreeProperty; N]) -> DeviceTreeNode {
    let mut node = DeviceTreeNode::new_unchecked(name);
    properties.into_iter().for_each(|property| node.add_property(property));
    node
}

/// The property `name` with `value`.
pub(crate) fn is(name: &str, value: impl ToPropertyValue) -> DeviceTreeProperty {
    DeviceTreeProperty::new_unchecked(name, value)
}

/// A property without a value.
pub(crate) fn flag(name: &str) -> DeviceTreeProperty {
    is(name, &[][..] as &[u8])
}

/// Addresses and sizes.
pub(crate) fn reg(spans: &[Span]) -> Vec<u32> {
    let numbers = spans.iter().flat_map(|span| [span.start, span.size_bytes()]);
    numbers.flat_map(|number| [(number >> 32) as u32, number as u32]).collect()
}

/// A tree with what each guest has: `root` describes the machine, the kernel has `command_line` and
/// `initramfs`, and the guest the memory `memory`.
pub(crate) fn with_memory<const N: usize>(
    root: [DeviceTreeProperty; N],
    command_line: &str,
    memory: Span,
    initramfs: Span,
) -> DeviceTree {
    let mut tree = DeviceTree::new();
    [is("#address-cells", 2_u32), is("#size-cells", 2_u32), is("model", "slat")]
        .into_iter()
        .chain(root)
        .for_each(|property| tree.root.add_property(property));
    tree.root.add_child(node(
        "chosen",
        [
            is("bootargs", command_line),
            is("linux,initrd-start", initramfs.start),
            is("linux,initrd-end", initramfs.end),
        ],
    ));
    tree.root.add_child(node(
        format!("memory@{:x}", memory.start),
        [is("device_type", "memory"), is("reg", reg(&[memory]))],
    ));
    tree
}
