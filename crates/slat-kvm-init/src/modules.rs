//! What a first process finds missing: file systems, and KVM's modules.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::path::Path;

use rustix::mount::{MountFlags, mount};
use rustix::system::{delete_module, finit_module};

use crate::wrong::Wrong;

/// How KVM translates the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Paging {
    /// By nested paging: the TDP MMU.
    Tdp,
    /// By shadow page tables.
    Shadow,
}

impl Paging {
    pub(crate) const ALL: [Paging; 2] = [Paging::Tdp, Paging::Shadow];

    /// The end of names of figures.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Paging::Tdp => "tdp",
            Paging::Shadow => "shadow",
        }
    }

    /// The parameters of `kvm-amd`.
    fn parameters(self) -> &'static CStr {
        match self {
            Paging::Tdp => c"npt=1",
            Paging::Shadow => c"npt=0",
        }
    }
}

/// Mounts them.
pub(crate) fn mount_file_systems() -> Result<(), Wrong> {
    for (name, folder) in [("proc", "/proc"), ("devtmpfs", "/dev"), ("sysfs", "/sys")] {
        fs::create_dir_all(folder).map_err(|error| Wrong::system("make a folder to mount on", error))?;
        match mount(name, folder, name, MountFlags::empty(), None) {
            // The kernel has mounted it already.
            Ok(()) | Err(rustix::io::Errno::BUSY) => {}
            Err(error) => return Err(Wrong::system("mount proc, devtmpfs and sysfs", error)),
        }
    }
    Ok(())
}

/// Loads the module `name`, unless it is part of the kernel: then it has no file.
pub(crate) fn load(name: &str, paging: Paging) -> Result<(), Wrong> {
    /// The kernel unpacks it (`MODULE_INIT_COMPRESSED_FILE`, linux/module.h).
    const COMPRESSED: i32 = 4;
    let parameters = if name == "kvm-amd" { paging.parameters() } else { c"" };
    for (ending, flags) in [("ko", 0), ("ko.xz", COMPRESSED), ("ko.zst", COMPRESSED)] {
        let path = Path::new("/modules").join(format!("{name}.{ending}"));
        if let Ok(file) = File::open(path) {
            return finit_module(file, parameters, flags).map_err(|error| Wrong::system("load a module of KVM", error));
        }
    }
    Ok(())
}

/// Unloads the module with the parameter.
pub(crate) fn unload_kvm_amd() -> Result<(), Wrong> {
    let name = CString::from(c"kvm_amd");
    delete_module(&name, 0).map_err(|error| Wrong::system("unload kvm_amd", error))
}
