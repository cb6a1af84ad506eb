//! What a first process finds missing: file systems, and modules of the kernel. The word `vmms=` on
//! the kernel's command line says whose first process it is.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, finit_module, reboot};

use crate::{Outcome, guest, machine};

/// The beginning of that word.
const WHOSE: &str = "vmms=";

/// Where an initramfs has the modules.
pub const MODULES: &str = "modules";

/// Does what the first process is for, and ends the machine.
pub fn run() -> ! {
    let result = mount_file_systems().and_then(|()| {
        let words = fs::read_to_string("/proc/cmdline").map_err(|error| format!("/proc/cmdline: {error}"))?;
        match words.split_whitespace().find_map(|word| word.strip_prefix(WHOSE)) {
            Some("machine") => machine::run(&words),
            Some("guest") => guest::run(),
            other => Err(format!("the kernel was told {WHOSE}{}", other.unwrap_or_default())),
        }
    });
    match result {
        Ok(()) => println!("{}", machine::PASSED),
        Err(why) => println!("{}{why}", machine::FAILED),
    }
    // The emulator ends where a machine would start again.
    let _ = reboot(RebootCommand::Restart);
    std::process::exit(1)
}

fn mount_file_systems() -> Outcome<()> {
    for (name, folder) in
        [("proc", "/proc"), ("devtmpfs", "/dev"), ("sysfs", "/sys"), ("tmpfs", "/tmp"), ("tmpfs", "/run")]
    {
        fs::create_dir_all(folder).map_err(|error| format!("{folder}: {error}"))?;
        match mount(name, folder, name, MountFlags::empty(), None) {
            // The kernel has mounted it already.
            Ok(()) | Err(rustix::io::Errno::BUSY) => {}
            Err(error) => return Err(format!("mount {folder}: {error}")),
        }
    }
    Ok(())
}

/// Loads the module `name`, which the initramfs has as Debian's package has it.
pub fn load_module(name: &str) -> Outcome<()> {
    /// The kernel unpacks it (`MODULE_INIT_COMPRESSED_FILE`, linux/module.h).
    const COMPRESSED: i32 = 4;
    for (ending, flags) in [("ko", 0), ("ko.xz", COMPRESSED), ("ko.zst", COMPRESSED)] {
        let path = Path::new("/").join(MODULES).join(format!("{name}.{ending}"));
        match File::open(&path) {
            Ok(file) => return finit_module(file, c"", flags).map_err(|error| format!("{}: {error}", path.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(format!("{}: {error}", path.display())),
        }
    }
    // Part of the kernel, or the next step says what it lacks.
    Ok(())
}
