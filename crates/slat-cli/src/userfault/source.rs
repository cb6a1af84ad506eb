//! The source of contents: what `--source` names, with its delay, and the peer in this process
//! where it names no other.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::Args;
use slat::PAGE_SIZE;
use slat_machine::paging::{LocalAddress, OpenSource, PagesServer, Pattern, SourceSpec};

use super::options::{SourceArg, UserfaultArgs};
use crate::failure::Failure;
use crate::options::CONTENTS;
use crate::results::Outcome;
use crate::session::Session;

/// An opened `--source`. Its peer lives as long.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) spec: SourceSpec,
    /// What threads request pages of.
    pub(super) open: OpenSource,
    /// What its pages must hold.
    pub(super) contents: Pattern,
    peer: Option<PagesServer>,
}

impl Source {
    /// The source that the options name, with at least `nr_bytes` if it is a file that is to be
    /// created.
    pub(super) fn open(args: &UserfaultArgs, nr_bytes: u64, session: &Session) -> Result<Source, Failure> {
        let contents = args.contents.contents().unwrap_or(Pattern::Mixed { seed: 0 });
        let own_peer = |address| -> Result<_, Failure> {
            let peer = start(&address, &args.contents, session)?;
            Ok((SourceSpec::Peer(peer.address().clone()), Some(peer)))
        };
        let (spec, peer) = match &args.source {
            SourceArg::Given(spec) => (spec.clone(), None),
            SourceArg::OwnTcp => own_peer(LocalAddress::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))))?,
            SourceArg::OwnUnix => own_peer(LocalAddress::Unix(own_path()))?,
        };
        if let Some(path) = &args.create_source {
            create(path, contents, nr_bytes.div_ceil(PAGE_SIZE))
                .map_err(|source| Failure::Write { path: path.clone(), source })?;
        }
        let open = spec.open()?;
        // A source that is too short is found before the measurement.
        if let Some(last_page) = nr_bytes.div_ceil(PAGE_SIZE).checked_sub(1) {
            open.requests()?.fetch_into(last_page, &mut [0; PAGE_SIZE as usize])?;
        }
        let (contents, open) = (spec.contents().unwrap_or(contents), open.delayed_by(args.delay));
        Ok(Source { spec, open, contents, peer })
    }

    /// A note on the source, for the output.
    pub(super) fn remark(&self) -> Option<String> {
        let peer = self.peer.as_ref()?;
        let address = peer.address();
        Some(format!("Pages come from a peer in this process, through {address}: it takes its share of the CPUs."))
    }
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example: slat serve-pages unix:/tmp/pages\n\
                        then:    slat userfault --exits --source unix:/tmp/pages")]
pub(crate) struct ServeArgs {
    /// Where to serve: unix:PATH or tcp:127.0.0.1:PORT
    #[arg(value_name = "ADDRESS")]
    address: LocalAddress,
    #[arg(long, default_value = "pattern", value_parser = contents, value_name = "CONTENTS", help = CONTENTS)]
    contents: SourceSpec,
}

pub(super) fn contents(text: &str) -> Result<SourceSpec, String> {
    match text.parse::<SourceSpec>() {
        Ok(spec) if spec.contents().is_some() => Ok(spec),
        _ => Err("there are pattern[:SEED], constant:BYTE".to_owned()),
    }
}

/// Serves pages until the process is ended.
pub(crate) fn serve(args: &ServeArgs, session: &Session) -> Result<Outcome, Failure> {
    let peer = start(&args.address, &args.contents, session)?;
    session.say(&format!("Serving {} at {}\n", args.contents, peer.address()))?;
    loop {
        std::thread::park();
    }
}

/// Starts a peer; an interruption removes its socket.
fn start(address: &LocalAddress, contents: &SourceSpec, session: &Session) -> Result<PagesServer, Failure> {
    let peer = PagesServer::start(address, contents)?;
    if let LocalAddress::Unix(path) = peer.address() {
        session.remove_if_interrupted(path.clone());
    }
    Ok(peer)
}

/// Writes a new file of pages; refuses an existing one.
fn create(path: &Path, contents: Pattern, nr_pages: u64) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create_new(path)?);
    contents.write_to(&mut file, nr_pages)?;
    file.flush()
}

/// A path for a socket that no other process uses and none has left: a killed process leaves its
/// own.
fn own_path() -> PathBuf {
    let path = |number: u64| std::env::temp_dir().join(format!("slat-pages-{}-{number}.socket", std::process::id()));
    let mut number = 0;
    while path(number).symlink_metadata().is_ok() {
        number += 1;
    }
    path(number)
}
