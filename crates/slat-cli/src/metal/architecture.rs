//! What depends on the instruction set of the emulated machine: its emulator, where its programs
//! are built for and come from, and how its Linux looks.

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
    pub(super) architecture: &'static str,
    /// The folder of its libraries, in `usr/lib`.
    pub(super) libraries: &'static str,
}

/// The machine of an instruction set, and its programs.
pub(super) struct Facts {
    /// The program of QEMU, and Debian's package of it.
    pub(super) qemu: &'static str,
    pub(super) qemu_package: &'static str,
    /// The machine and its CPUs, for QEMU: with second-stage hardware, and on x86 with an interrupt
    /// controller whose registers need no memory. Pointer authentication and vectors only cost
    /// time.
    pub(super) machine: &'static [&'static str],
    /// How the lines of what boots come to the emulator's standard error, and its verdict to the
    /// exit code: by devices, or by calls of the debugger's (semihosting).
    pub(super) console: &'static [&'static str],
    /// The same with KVM, where a process makes such calls.
    pub(super) kvm_console: &'static [&'static str],
    /// The name of the serial line for Linux.
    pub(super) serial: &'static str,
    /// Where the machine has its memory.
    pub(super) memory_start: u64,
    /// `None`: a boot loader loads files, and tells the hypervisor where they are.
    pub(super) loading: Option<Loading>,
    /// Rust's target of the hypervisor, and flags of the compiler for it.
    pub(super) bare_target: &'static str,
    pub(super) bare_flags: &'static [&'static str],
    /// Rust's target of programs that run on Linux.
    pub(super) linux_target: &'static str,
    /// `None`: that of this machine.
    pub(super) debian: Option<Debian>,
    /// What names of folders in the cache end with.
    pub(super) suffix: &'static str,
    /// Debian's package that depends on its newest kernel: of its cloud images, where there is one,
    /// which are the smallest.
    pub(super) kernel_package: &'static str,
    /// The modules that KVM consists of in this kernel: their names, up to the first dot.
    pub(super) kvm_modules: &'static [&'static str],
    /// Linux, Documentation/arch/: x86/boot.rst, arm64/booting.rst, riscv/boot-image-header.rst.
    pub(super) kernel: Magic,
}

// A file that is another's pipe: the emulator has one standard output.
const X86_CONSOLE: &[&str] = &["-debugcon", "file:/dev/stderr", "-device", "isa-debug-exit,iobase=0xf4,iosize=1"];

const X86: Facts = Facts {
    qemu: "qemu-system-x86_64",
    qemu_package: "qemu-system-x86",
    machine: &["-cpu", "EPYC,+svm,+npt,+x2apic"],
    console: X86_CONSOLE,
    kvm_console: X86_CONSOLE,
    serial: "ttyS0",
    memory_start: 0,
    loading: None,
    bare_target: "x86_64-unknown-linux-gnu",
    // It is loaded where it is linked.
    bare_flags: &["-Crelocation-model=static", "-Ccode-model=small"],
    linux_target: "x86_64-unknown-linux-gnu",
    debian: None,
    suffix: "",
    kernel_package: "linux-image-cloud-amd64",
    // On AMD's CPUs.
    kvm_modules: &["irqbypass", "kvm", "kvm-amd"],
    kernel: Magic { at: 0x202, bytes: b"HdrS", name: "bzImage of Linux for x86" },
};

const ARM: Facts = Facts {
    qemu: "qemu-system-aarch64",
    qemu_package: "qemu-system-arm",
    machine: &["-machine", "virt,virtualization=on,gic-version=3", "-cpu", "max,pauth=off,sve=off,sme=off"],
    console: &["-semihosting"],
    kvm_console: &["-semihosting-config", "enable=on,userspace=on"],
    serial: "ttyAMA0",
    // Of the machine `virt`.
    memory_start: 0x4000_0000,
    loading: Some(Loading { first: 0x4800_0000, aligned: 2 << 20 }),
    bare_target: "aarch64-unknown-none-softfloat",
    bare_flags: &[],
    linux_target: "aarch64-unknown-linux-gnu",
    debian: Some(Debian { architecture: "arm64", libraries: "aarch64-linux-gnu" }),
    suffix: "-arm",
    kernel_package: "linux-image-cloud-arm64",
    // It is part of the kernel.
    kvm_modules: &[],
    kernel: Magic { at: 0x38, bytes: b"ARM\x64", name: "uncompressed Image of Linux for arm64" },
};

const RISC_V: Facts = Facts {
    qemu: "qemu-system-riscv64",
    qemu_package: "qemu-system-riscv",
    machine: &["-machine", "virt", "-cpu", "rv64,h=true"],
    serial: "ttyS0",
    memory_start: 0x8000_0000,
    loading: Some(Loading { first: 0x8800_0000, aligned: 2 << 20 }),
    bare_target: "riscv64imac-unknown-none-elf",
    linux_target: "riscv64gc-unknown-linux-gnu",
    debian: Some(Debian { architecture: "riscv64", libraries: "riscv64-linux-gnu" }),
    suffix: "-riscv",
    kernel_package: "linux-image-riscv64",
    kvm_modules: &["irqbypass", "kvm"],
    kernel: Magic { at: 0x38, bytes: b"RSC\x05", name: "uncompressed Image of Linux for riscv64" },
    // Its consoles are like Arm's.
    ..ARM
};

impl Architecture {
    pub(super) fn facts(self) -> &'static Facts {
        match self {
            Architecture::X86 => &X86,
            Architecture::Arm => &ARM,
            Architecture::RiscV => &RISC_V,
        }
    }
}
