//! Links the image to be loaded by a boot loader, at the addresses of its architecture's `link.ld`.

use std::env;

fn main() {
    // Without the name: nothing is linked but a library.
    let arch = match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("x86_64") => "x86",
        Ok("aarch64") => "arm",
        Ok("riscv64") => "riscv",
        _ => return,
    };
    let script = format!("{}/src/arch/{arch}/link.ld", env!("CARGO_MANIFEST_DIR"));
    println!("cargo:rerun-if-changed={script}");
    // A target without an operating system is linked by the linker itself, the other one by a C
    // compiler.
    let has_system = env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system != "none");
    let arguments: &[&str] = if has_system {
        &["-nostdlib", "-nostartfiles", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,max-page-size=4096"]
    } else {
        &["--build-id=none", "-zmax-page-size=4096"]
    };
    for argument in arguments {
        println!("cargo:rustc-link-arg-bin=slat-metal={argument}");
    }
    println!("cargo:rustc-link-arg-bin=slat-metal=-T{script}");
}
