//! What depends on the instruction set of the emulated machine: its emulator, where its programs
//! are built for and come from, and how its Linux looks.

use super::emulator::Boot;

/// An instruction set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Architecture {
    X86,
    Arm,
    RiscV,
}

/// Files that the emulator itself puts into memory, since no boot loader does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Loading {
    /// The address of the first: below it there is room for firmware and hypervisor.
    pub(super) first: u64,
    /// What the address of each is a multiple of.
    pub(super) aligned: u64,
}

/// How the header of a kernel is told from other files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Magic {
    pub(super) at: usize,
    pub(super) bytes: &'static [u8],
    /// What the kernel is called.
    pub(super) name: &'static str,
}

/// Debian's packages of another architecture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Debian {
    /// Its name.
    pub(super) architecture: &'static str,
    /// The folder of its libraries, in `usr/lib`.
    pub(super) libraries: &'static str,
}

impl Architecture {
    /// The program of QEMU.
    pub(super) fn qemu(self) -> &'static str {
        match self {
            Architecture::X86 => "qemu-system-x86_64",
            Architecture::Arm => "qemu-system-aarch64",
            Architecture::RiscV => "qemu-system-riscv64",
        }
    }

    /// Debian's package of it.
    pub(super) fn qemu_package(self) -> &'static str {
        match self {
            Architecture::X86 => "qemu-system-x86",
            Architecture::Arm => "qemu-system-arm",
            Architecture::RiscV => "qemu-system-riscv",
        }
    }

    /// The machine and its CPUs, for QEMU: with second-stage hardware, and on x86 with an interrupt
    /// controller whose registers need no memory. Pointer authentication and vectors only cost
    /// time.
    pub(super) fn machine(self) -> &'static [&'static str] {
        match self {
            Architecture::X86 => &["-cpu", "EPYC,+svm,+npt,+x2apic"],
            Architecture::Arm => {
                &["-machine", "virt,virtualization=on,gic-version=3", "-cpu", "max,pauth=off,sve=off,sme=off"]
            }
            Architecture::RiscV => &["-machine", "virt", "-cpu", "rv64,h=true"],
        }
    }

    /// How the lines of what boots come to the emulator's standard error, and its verdict to the
    /// exit code: by devices, or by calls of the debugger's (semihosting). With KVM a process makes
    /// them.
    pub(super) fn console(self, boot: Boot) -> &'static [&'static str] {
        match (self, boot) {
            // A file that is another's pipe: the emulator has one standard output.
            (Architecture::X86, _) => {
                &["-debugcon", "file:/dev/stderr", "-device", "isa-debug-exit,iobase=0xf4,iosize=1"]
            }
            (Architecture::Arm | Architecture::RiscV, Boot::Kvm) => &["-semihosting-config", "enable=on,userspace=on"],
            (Architecture::Arm | Architecture::RiscV, _) => &["-semihosting"],
        }
    }

    /// The name of the serial line for Linux.
    pub(super) fn serial(self) -> &'static str {
        match self {
            Architecture::X86 | Architecture::RiscV => "ttyS0",
            Architecture::Arm => "ttyAMA0",
        }
    }

    /// Where the machine has its memory.
    pub(super) fn memory_start(self) -> u64 {
        match self {
            Architecture::X86 => 0,
            // Of the machine `virt`.
            Architecture::Arm => 0x4000_0000,
            Architecture::RiscV => 0x8000_0000,
        }
    }

    /// `None`: a boot loader loads files, and tells the hypervisor where they are.
    pub(super) fn loading(self) -> Option<Loading> {
        match self {
            Architecture::X86 => None,
            Architecture::Arm | Architecture::RiscV => {
                Some(Loading { first: self.memory_start() + (128 << 20), aligned: 2 << 20 })
            }
        }
    }

    /// Rust's target of the hypervisor.
    pub(super) fn bare_target(self) -> &'static str {
        match self {
            Architecture::X86 => "x86_64-unknown-linux-gnu",
            Architecture::Arm => "aarch64-unknown-none-softfloat",
            Architecture::RiscV => "riscv64imac-unknown-none-elf",
        }
    }

    /// Rust's target of programs that run on Linux.
    pub(super) fn linux_target(self) -> &'static str {
        match self {
            Architecture::X86 => "x86_64-unknown-linux-gnu",
            Architecture::Arm => "aarch64-unknown-linux-gnu",
            Architecture::RiscV => "riscv64gc-unknown-linux-gnu",
        }
    }

    /// `None`: that of this machine.
    pub(super) fn debian(self) -> Option<Debian> {
        match self {
            Architecture::X86 => None,
            Architecture::Arm => Some(Debian { architecture: "arm64", libraries: "aarch64-linux-gnu" }),
            Architecture::RiscV => Some(Debian { architecture: "riscv64", libraries: "riscv64-linux-gnu" }),
        }
    }

    /// Debian's package that depends on its newest kernel: of its cloud images, where there is one,
    /// which are the smallest.
    pub(super) fn kernel_package(self) -> &'static str {
        match self {
            Architecture::X86 => "linux-image-cloud-amd64",
            Architecture::Arm => "linux-image-cloud-arm64",
            Architecture::RiscV => "linux-image-riscv64",
        }
    }

    /// The modules that KVM consists of in this kernel: their names, up to the first dot.
    pub(super) fn kvm_modules(self) -> &'static [&'static str] {
        match self {
            // On AMD's CPUs.
            Architecture::X86 => &["irqbypass", "kvm", "kvm-amd"],
            // It is part of the kernel.
            Architecture::Arm => &[],
            Architecture::RiscV => &["irqbypass", "kvm"],
        }
    }

    /// Linux, Documentation/arch/: x86/boot.rst, arm64/booting.rst, riscv/boot-image-header.rst.
    pub(super) fn kernel(self) -> Magic {
        match self {
            Architecture::X86 => Magic { at: 0x202, bytes: b"HdrS", name: "bzImage of Linux for x86" },
            Architecture::Arm => Magic { at: 0x38, bytes: b"ARM\x64", name: "uncompressed Image of Linux for arm64" },
            Architecture::RiscV => {
                Magic { at: 0x38, bytes: b"RSC\x05", name: "uncompressed Image of Linux for riscv64" }
            }
        }
    }
}
