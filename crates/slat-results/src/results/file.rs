//! Files of results.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::ser::Formatter;

/// Prints `text`, now.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// A file for results, opened before the work begins, so that a path that cannot be written is
/// found first. Old contents stay until there are results, and a new file without results is
/// removed. The path `-` is the standard output.
#[derive(Debug)]
pub struct ResultsFile {
    path: PathBuf,
    /// `None`: the standard output.
    file: Option<File>,
    /// The file is new, and empty.
    is_new: bool,
}

impl ResultsFile {
    pub fn open(path: &Path) -> io::Result<ResultsFile> {
        if path == Path::new("-") {
            return Ok(ResultsFile { path: path.to_owned(), file: None, is_new: false });
        }
        let open = |options: &mut OpenOptions| options.write(true).open(path);
        let (file, is_new) = match open(OpenOptions::new().create_new(true)) {
            Ok(file) => (Ok(file), true),
            Err(_) => (open(&mut OpenOptions::new()), false),
        };
        match file {
            Ok(file) => Ok(ResultsFile { path: path.to_owned(), file: Some(file), is_new }),
            Err(error) => Err(error),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn is_stdout(&self) -> bool {
        self.file.is_none()
    }

    /// Writes `content`.
    pub fn write(mut self, content: &str) -> io::Result<()> {
        self.is_new = false;
        let Some(file) = &mut self.file else { return print(content) };
        // Only a regular file has a length to cut.
        let is_regular = file.metadata().is_ok_and(|metadata| metadata.is_file());
        let cut = if is_regular { file.set_len(0) } else { Ok(()) };
        cut.and_then(|()| file.write_all(content.as_bytes()))
    }

    /// Writes `value` as JSON.
    pub fn write_json(self, value: &impl Serialize) -> io::Result<()> {
        let mut text = Vec::new();
        let mut serializer = serde_json::Serializer::with_formatter(&mut text, Lines::default());
        value.serialize(&mut serializer)?;
        self.write(&format!("{}\n", String::from_utf8_lossy(&text)))
    }
}

impl Drop for ResultsFile {
    fn drop(&mut self) {
        if self.is_new {
            // At worst an empty file remains.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// JSON with a line for each field of the object, and for each figure: samples would take a line
/// each in the usual form.
#[derive(Default)]
struct Lines {
    depth: usize,
}

impl Lines {
    fn separate<W: ?Sized + Write>(&self, writer: &mut W, first: bool) -> io::Result<()> {
        match (first, self.depth) {
            (true, 1..=2) => writer.write_all(b"\n"),
            (true, _) => Ok(()),
            (false, 1..=2) => writer.write_all(b",\n"),
            (false, _) => writer.write_all(b", "),
        }
    }
}

impl Formatter for Lines {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth += 1;
        writer.write_all(b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth -= 1;
        writer.write_all(b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.separate(writer, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth += 1;
        writer.write_all(b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth -= 1;
        writer.write_all(b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.separate(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
