//! Tests and examples find the library where it was linked from.
fn main() {
    if let Ok(folder) = std::env::var("DEP_FLASHKERNEL_LIBDIR") {
        for kind in ["tests", "examples"] {
            println!("cargo:rustc-link-arg-{kind}=-Wl,-rpath,{folder}");
        }
    }
}
