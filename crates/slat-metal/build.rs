//! Links the image to be loaded by a boot loader, at the addresses of `link.ld`.

fn main() {
    println!("cargo:rerun-if-changed=link.ld");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/link.ld");
    for argument in
        ["-nostdlib", "-nostartfiles", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,max-page-size=4096"]
    {
        println!("cargo:rustc-link-arg-bin=slat-metal={argument}");
    }
    println!("cargo:rustc-link-arg-bin=slat-metal=-T{script}");
}
