//! Finds libflashkernel: in FLASHKERNEL_DIR (an install tree, or a folder that holds the library), else by pkg-config.
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn holds_library(folder: &Path) -> bool {
    ["libflashkernel.so", "libflashkernel.dylib", "libflashkernel.a", "flashkernel.lib"]
        .iter()
        .any(|name| folder.join(name).exists())
}

/// The folder of the library in an install tree.
fn library_folder(root: &Path) -> Option<PathBuf> {
    let mut folders = vec![root.to_path_buf(), root.join("lib"), root.join("lib64")];
    if let Ok(entries) = std::fs::read_dir(root.join("lib")) {
        folders.extend(entries.flatten().map(|entry| entry.path())); // lib/x86_64-linux-gnu
    }
    folders.into_iter().find(|folder| holds_library(folder))
}

fn pkg_config(arguments: &[&str]) -> Result<String, String> {
    let program = env::var("PKG_CONFIG").unwrap_or_else(|_| "pkg-config".into());
    let output = Command::new(&program).args(arguments).arg("flashkernel").output();
    match output {
        Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(format!("{program} does not run: {error}")),
    }
}

/// A static library alone: then what it is linked with has to be named, too.
fn link_static(folder: &Path) {
    println!("cargo:rustc-link-lib=static=flashkernel");
    println!("cargo:rustc-link-search=native={}", folder.display());
    println!("cargo:rustc-link-lib=dylib=stdc++");
}

fn main() {
    println!("cargo:rerun-if-env-changed=FLASHKERNEL_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    let folder = match env::var_os("FLASHKERNEL_DIR") {
        Some(root) => library_folder(Path::new(&root))
            .unwrap_or_else(|| panic!("FLASHKERNEL_DIR is {root:?}; there is no libflashkernel in it, nor in its lib")),
        None => match pkg_config(&["--variable=libdir"]) {
            Ok(folder) => PathBuf::from(folder.trim()),
            Err(error) => panic!("libflashkernel is not found; set FLASHKERNEL_DIR or PKG_CONFIG_PATH. {error}"),
        },
    };
    let only_static = folder.join("libflashkernel.a").exists()
        && !folder.join("libflashkernel.so").exists()
        && !folder.join("libflashkernel.dylib").exists();
    if only_static {
        link_static(&folder);
    } else {
        println!("cargo:rustc-link-search=native={}", folder.display());
        println!("cargo:rustc-link-lib=dylib=flashkernel");
    }
    println!("cargo:libdir={}", folder.display()); // DEP_FLASHKERNEL_LIBDIR, for the run path of tests and examples
}
