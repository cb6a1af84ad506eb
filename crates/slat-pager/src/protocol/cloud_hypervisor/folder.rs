//! A snapshot in a folder, as Cloud Hypervisor's own daemon lays it out: `migration_config.json`,
//! `state.json`, and `memory-N` for each slot.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::Error;

/// The configuration of the VM.
pub const CONFIG: &str = "migration_config.json";
/// The state of its devices.
pub const STATE: &str = "state.json";

/// The file of a slot's memory.
pub fn memory_name(slot: u32) -> String {
    format!("memory-{slot}")
}

/// A folder that takes its name once it is whole and durable; dropped before, it is removed. It has
/// the memory of a guest: only its user may read it. A process that is killed leaves it behind
/// under the name `NAME.unfinished-` with random letters, which no later store uses.
#[derive(Debug)]
pub(super) struct NewFolder {
    path: PathBuf,
    unfinished: TempDir,
}

/// Whether there can be a new folder: `path` is not there yet, or empty.
///
/// # Errors
/// [`Error`](enum@Error): it is not so, or the folder cannot be read.
pub fn check_free(path: &Path) -> Result<(), Error> {
    match fs::read_dir(path).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::file(path)(io::ErrorKind::DirectoryNotEmpty.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::file(path)(error)),
    }
}

impl NewFolder {
    /// A folder that becomes `path`, which is not there yet, or empty.
    pub(super) fn new(path: &Path) -> Result<NewFolder, Error> {
        let mut name =
            path.file_name().ok_or_else(|| Error::file(path)(io::ErrorKind::InvalidFilename.into()))?.to_owned();
        check_free(path)?;
        name.push(".unfinished-");
        let parent = parent(path);
        fs::create_dir_all(parent).map_err(Error::file(parent))?;
        let unfinished = tempfile::Builder::new()
            .prefix(&name)
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(parent)
            .map_err(Error::file(parent))?;
        Ok(NewFolder { path: path.to_owned(), unfinished })
    }

    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.unfinished.path().join(name)
    }

    /// A new file in it.
    pub(super) fn create(&self, name: &str) -> Result<File, Error> {
        let path = self.path_of(name);
        File::options().write(true).create_new(true).mode(0o600).open(&path).map_err(Error::file(path))
    }

    /// A new file in it, with `bytes`, which are durable.
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let mut file = self.create(name)?;
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(Error::file(self.path_of(name)))
    }

    /// Gives it its name, durably.
    pub(super) fn finish(self) -> Result<(), Error> {
        let sync = |path: &Path| File::open(path).and_then(|folder| folder.sync_all()).map_err(Error::file(path));
        sync(self.unfinished.path())?;
        fs::rename(self.unfinished.path(), &self.path).map_err(Error::file(&self.path))?;
        // Nothing is to be removed any more.
        let _ = self.unfinished.keep();
        sync(parent(&self.path))
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
