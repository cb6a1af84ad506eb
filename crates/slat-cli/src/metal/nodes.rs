//! The NUMA nodes of the machine: how the emulator gets them, and so which memory is on which. It
//! is the command's own knowledge: the hypervisor has only what the firmware tells it.

/// The memory of each node, one behind the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct NodeMemory {
    /// Where the machine has memory.
    start: u64,
    /// MiB of each node.
    mib: Vec<u64>,
}

impl NodeMemory {
    /// `mib` from `start` on, in `nr_nodes` parts.
    pub(super) fn new(start: u64, mib: u64, nr_nodes: u32) -> NodeMemory {
        let nr_nodes = u64::from(nr_nodes.max(1));
        let each = mib / nr_nodes;
        let last = mib - each * (nr_nodes - 1);
        NodeMemory { start, mib: (1..nr_nodes).map(|_| each).chain([last]).collect() }
    }

    /// MiB, in all.
    pub(super) fn mib(&self) -> u64 {
        self.mib.iter().sum()
    }

    /// The node of the memory at `address`.
    pub(super) fn of(&self, address: u64) -> Option<u32> {
        let mut rest = address.checked_sub(self.start)? >> 20;
        self.mib.iter().zip(0..).find_map(|(&mib, node)| {
            let is_here = rest < mib;
            rest = rest.saturating_sub(mib);
            is_here.then_some(node)
        })
    }

    /// The words for QEMU, of a machine with `nr_cpus` CPUs, which are on the nodes in turns.
    /// `backend` has the kind of memory with its size and where in it the node begins, both in MiB.
    pub(super) fn of_qemu(&self, nr_cpus: u32, backend: impl Fn(u64, u64) -> String) -> Vec<String> {
        let mut words = Vec::new();
        let mut first = 0;
        for (&mib, node) in self.mib.iter().zip(0..) {
            words.extend(["-object".to_owned(), format!("{},id=ram{node}", backend(mib, first))]);
            first += mib;
            if self.mib.len() > 1 {
                let cpus = (0..nr_cpus).filter(|cpu| cpu % self.mib.len() as u32 == node);
                let cpus: String = cpus.map(|cpu| format!(",cpus={cpu}")).collect();
                words.extend(["-numa".to_owned(), format!("node,nodeid={node},memdev=ram{node}{cpus}")]);
            }
        }
        if self.mib.len() == 1 {
            words.extend(["-machine", "memory-backend=ram0"].map(str::to_owned));
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_on_the_node_that_the_emulator_was_told() {
        let nodes = NodeMemory::new(0x4000_0000, 769, 2);
        assert_eq!(nodes.mib(), 769);
        let at = |mib: u64| nodes.of(0x4000_0000 + (mib << 20));
        assert_eq!([at(0), at(383), at(384), at(768), at(769)], [Some(0), Some(0), Some(1), Some(1), None]);
        assert_eq!(nodes.of(0x3fff_ffff), None);
        let words = nodes.of_qemu(3, |mib, first| format!("ram,size={mib}M,at={first}"));
        let expected = "-object ram,size=384M,at=0,id=ram0 -numa node,nodeid=0,memdev=ram0,cpus=0,cpus=2 \
                        -object ram,size=385M,at=384,id=ram1 -numa node,nodeid=1,memdev=ram1,cpus=1";
        assert_eq!(words.join(" "), expected);
        let words = NodeMemory::new(0, 512, 1).of_qemu(2, |mib, _| format!("ram,size={mib}M"));
        assert_eq!(words.join(" "), "-object ram,size=512M,id=ram0 -machine memory-backend=ram0");
    }
}
