//! What the device tree has beside memory: the harts, their time, and the UART.

use arrayvec::ArrayVec;
use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::{FdtStringListIterator, Node, Property};
use thiserror::Error;

use super::features::Features;
use crate::boot::{MAX_CPUS, Region, Span};
use crate::device_tree::{self, Cpu, TreeError};

/// A machine that cannot be run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum BootError {
    /// The device tree.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A number that no mask has.
    #[error("the device tree has hart {0}; numbers below 64 are possible")]
    LargeHart(u64),
    /// The UART is no device that a guest can have.
    #[error("the device tree has a UART at {0:#x}, where memory is, or where no register can be")]
    BadUart(u64),
    /// No clock.
    #[error("the device tree has no frequency of the time counter (timebase-frequency)")]
    NoFrequency,
}

fn text(node: FdtNode<'static>, name: &str) -> Option<&'static str> {
    node.property(name)?.value_as::<&'static str>().ok()
}

fn number(node: FdtNode<'static>, name: &str) -> Option<u64> {
    let property = node.property(name)?;
    property.value_as::<u32>().map(u64::from).or_else(|_| property.value_as::<u64>()).ok()
}

/// The harts that can be started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Harts {
    /// Their numbers, that of the boot hart first.
    pub numbers: ArrayVec<u64, MAX_CPUS>,
    /// What all of them have.
    pub features: Features,
    /// How fast their time goes.
    pub time_per_s: u64,
}

impl Harts {
    /// Those of `fdt`, of the machine whose hart `boot_hart` reads it.
    ///
    /// # Errors
    /// [`BootError`].
    pub fn read(fdt: Fdt<'static>, boot_hart: u64) -> Result<Harts, BootError> {
        let cpus = fdt.find_node("/cpus").ok_or(TreeError::NoCpus)?;
        let found = device_tree::cpus(fdt, boot_hart)?;
        let time_per_s = number(cpus, "timebase-frequency").filter(|&hz| hz > 0).ok_or(BootError::NoFrequency)?;
        let mut features = Features::all();
        for &Cpu { number: hart, node } in &found {
            if hart >= 64 {
                return Err(BootError::LargeHart(hart));
            }
            let names = node.property("riscv,isa-extensions").and_then(|names| names.value_as().ok());
            let names = names.map(|names: FdtStringListIterator<'static>| Features::of_names(names));
            let isa = text(node, "riscv,isa").map(Features::of_isa);
            features &= names.or(isa).unwrap_or(Features::empty());
        }
        Ok(Harts { numbers: found.iter().map(|cpu| cpu.number).collect(), features, time_per_s })
    }
}

/// A UART of the kind that PCs have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Uart {
    /// Its first register.
    pub start: u64,
    /// Its frequency in hertz.
    pub hz: u64,
}

impl Uart {
    /// Its registers.
    pub fn span(self) -> Span {
        Span { start: self.start, end: self.start.saturating_add(0x100) }
    }

    /// The first one of `fdt`, if there is one. A guest can have it only where its pages are
    /// `usable`, and nothing of the memory map `regions` is: also not what is reserved, since the
    /// firmware is there.
    ///
    /// # Errors
    /// [`BootError::BadUart`].
    pub fn read(
        fdt: Fdt<'static>,
        usable: Span,
        mut regions: impl Iterator<Item = Region>,
    ) -> Result<Option<Uart>, BootError> {
        let is_uart =
            |node: &FdtNode<'static>| node.compatible().is_some_and(|mut names| names.any(|name| name == "ns16550a"));
        let mut nodes = fdt.find_node("/soc").into_iter().flat_map(|node| node.children());
        let Some(node) = nodes.find(is_uart) else { return Ok(None) };
        let Some(Span { start, .. }) = device_tree::span(node, 0) else { return Ok(None) };
        let uart = Uart { start, hz: number(node, "clock-frequency").unwrap_or_default() };
        let pages = uart.span().pages();
        if pages.and(usable) != pages || regions.any(|region| region.span.overlaps(pages)) {
            return Err(BootError::BadUart(start));
        }
        Ok(Some(uart))
    }
}

#[cfg(test)]
mod tests {
    use alloc::boxed::Box;
    use alloc::format;
    use alloc::vec::Vec;

    use dtoolkit::ToPropertyValue;
    use dtoolkit::model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty};

    use super::*;
    use crate::boot::RegionKind;

    fn node(name: &str, properties: &[DeviceTreeProperty], children: &[DeviceTreeNode]) -> DeviceTreeNode {
        let mut node = DeviceTreeNode::new_unchecked(name);
        properties.iter().for_each(|property| node.add_property(property.clone()));
        children.iter().for_each(|child| node.add_child(child.clone()));
        node
    }

    fn is(name: &str, value: impl ToPropertyValue) -> DeviceTreeProperty {
        DeviceTreeProperty::new_unchecked(name, value)
    }

    fn tree(children: &[DeviceTreeNode]) -> Fdt<'static> {
        let mut tree = DeviceTree::new();
        tree.root = node("", &[is("#address-cells", 1_u32), is("#size-cells", 1_u32)], children);
        Fdt::new(Box::leak(tree.to_dtb().into_boxed_slice())).unwrap()
    }

    fn hart(number: u32, isa: &str) -> DeviceTreeNode {
        node(&format!("cpu@{number:x}"), &[is("reg", number), is("riscv,isa", isa)], &[])
    }

    /// The harts of a tree with `properties` of all CPUs.
    fn harts(properties: &[DeviceTreeProperty], harts: &[DeviceTreeNode]) -> Result<Harts, BootError> {
        let cells = [is("#address-cells", 1_u32), is("#size-cells", 0_u32)];
        Harts::read(tree(&[node("cpus", &[&cells, properties].concat(), harts)]), 1)
    }

    #[test]
    fn harts_have_their_numbers_their_time_and_what_all_of_them_have() {
        let time = [is("timebase-frequency", 10_000_000_u32)];
        let found = harts(&time, &[hart(0, "rv64ih_sstc_svadu"), hart(1, "rv64ih_sstc")]).unwrap();
        assert_eq!((&found.numbers[..], found.time_per_s), (&[1, 0][..], 10_000_000));
        assert_eq!(found.features, Features::H | Features::SSTC);
        // A frequency of 64 bits, and a hart that says nothing of itself.
        let time = [is("timebase-frequency", &[1_u32, 0][..])];
        let found = harts(&time, &[node("cpu@1", &[is("reg", 1_u32)], &[])]).unwrap();
        assert_eq!((found.features, found.time_per_s), (Features::empty(), 1 << 32));
    }

    #[test]
    fn a_machine_without_harts_or_time_is_refused() {
        let (time, all) = ([is("timebase-frequency", 1_u32)], [hart(0, "rv64ih"), hart(1, "rv64ih")]);
        assert_eq!(Harts::read(tree(&[]), 1), Err(TreeError::NoCpus.into()));
        assert_eq!(harts(&time, &[]), Err(TreeError::NoCpus.into()));
        assert_eq!(harts(&[], &[]), Err(TreeError::NoCpus.into()));
        assert_eq!(harts(&time, &all[..1]), Err(TreeError::NoBootCpu(1).into()));
        assert_eq!(harts(&[], &all), Err(BootError::NoFrequency));
        assert_eq!(harts(&[is("timebase-frequency", 0_u32)], &all), Err(BootError::NoFrequency));
        assert_eq!(harts(&[is("timebase-frequency", "fast")], &all), Err(BootError::NoFrequency));
        assert_eq!(harts(&time, &[hart(1, "rv64ih"), hart(64, "rv64ih")]), Err(BootError::LargeHart(64)));
    }

    #[test]
    fn a_uart_is_where_no_memory_is() {
        let usable = Span { start: 0x1000, end: 1 << 52 };
        let uart = |start: u32| {
            let cells = [is("#address-cells", 1_u32), is("#size-cells", 1_u32)];
            let reg = [start, 0x100];
            let properties = [is("compatible", "ns16550a"), is("reg", &reg[..]), is("clock-frequency", 7_u32)];
            tree(&[node("soc", &cells, &[node("rtc@0", &[], &[]), node("serial@0", &properties, &[])])])
        };
        let memory = |start, end| [Region { span: Span { start, end }, kind: RegionKind::Firmware }].into_iter();
        let none = || Vec::new().into_iter();
        assert_eq!(Uart::read(tree(&[]), usable, none()), Ok(None));
        assert_eq!(Uart::read(uart(0x1000_0000), usable, none()), Ok(Some(Uart { start: 0x1000_0000, hz: 7 })));
        assert_eq!(Uart::read(uart(0x800), usable, none()), Err(BootError::BadUart(0x800)));
        let reserved = memory(0x1000_0f00, 0x1000_2000);
        assert_eq!(Uart::read(uart(0x1000_0000), usable, reserved), Err(BootError::BadUart(0x1000_0000)));
    }
}
