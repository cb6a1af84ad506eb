//! As much of HTTP as the VMMs' APIs and the pager's metrics need: one call on a Unix socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::Outcome;
use crate::process::PATIENCE;

/// Calls the API at `socket`, and returns what it answers: an error unless the status is 2xx.
pub fn call(socket: &Path, method: &str, path: &str, body: &str) -> Outcome<String> {
    let failed = |why: &dyn std::fmt::Display| format!("{method} {path}: {why}");
    let exchange = || -> std::io::Result<(String, String)> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = BufReader::new(stream);
        let mut status = String::new();
        answer.read_line(&mut status)?;
        let mut nr_bytes = 0;
        loop {
            let mut line = String::new();
            answer.read_line(&mut line)?;
            if line.trim().is_empty() {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                nr_bytes = value.trim().parse().map_err(std::io::Error::other)?;
            }
        }
        let mut body = String::new();
        answer.take(nr_bytes).read_to_string(&mut body)?;
        Ok((status, body))
    };
    let (status, body) = exchange().map_err(|error| failed(&error))?;
    match status.split(' ').nth(1) {
        Some(code) if code.starts_with('2') => Ok(body),
        _ => Err(failed(&format!("{} {body}", status.trim()))),
    }
}
