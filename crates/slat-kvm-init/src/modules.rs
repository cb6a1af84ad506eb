//! What a first process finds missing: file systems, and KVM's modules.

use std::ffi::CStr;
use std::fs::{self, File};
use std::path::Path;

use rustix::mount::{MountFlags, mount};
use rustix::system::{delete_module, finit_module};

use crate::wrong::Wrong;

/// How KVM translates the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Paging {
    /// The end of names of figures.
    pub(crate) name: &'static str,
    /// What makes KVM do so, where there is a choice.
    pub(crate) module: Option<Module>,
}

/// A module with parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Module {
    /// The name of its file, up to the first dot.
    pub(crate) file: &'static str,
    /// As the kernel calls it.
    pub(crate) name: &'static CStr,
    pub(crate) parameters: &'static CStr,
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
pub(crate) fn load(name: &str, parameters: &CStr) -> Result<(), Wrong> {
    /// The kernel unpacks it (`MODULE_INIT_COMPRESSED_FILE`, linux/module.h).
    const COMPRESSED: i32 = 4;
    for (ending, flags) in [("ko", 0), ("ko.xz", COMPRESSED), ("ko.zst", COMPRESSED)] {
        let path = Path::new("/modules").join(format!("{name}.{ending}"));
        if let Ok(file) = File::open(path) {
            return finit_module(file, parameters, flags).map_err(|error| Wrong::system("load a module of KVM", error));
        }
    }
    Ok(())
}

/// Unloads the module `name`.
pub(crate) fn unload(name: &CStr) -> Result<(), Wrong> {
    delete_module(name, 0).map_err(|error| Wrong::system("unload a module of KVM", error))
}
