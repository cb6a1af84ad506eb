//! `slat-pager share`: serves snapshots to other pagers.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use clap::Args;

use super::TlsArgs;
use crate::snapshot::{OpenWith, SnapshotName};
use crate::source::SourceError;
use crate::source::cache::{BlockCache, CacheOptions};
use crate::source::peer::PeerServer;

/// Serves snapshots to other pagers, over TCP with TLS. They open them as peer:HOST:PORT/NAME.
#[derive(Args, Clone, Debug)]
pub struct ShareArgs {
    /// What is served, and how peers call it
    #[arg(required = true, value_name = "NAME=SNAPSHOT", value_parser = parse_shared)]
    shared: Vec<(String, SnapshotName)>,
    /// Where to listen
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    #[command(flatten)]
    tls: TlsArgs,
}

fn parse_shared(text: &str) -> Result<(String, SnapshotName), String> {
    let (name, snapshot) = text.split_once('=').ok_or("it should be NAME=SNAPSHOT")?;
    if name.is_empty() || name.len() > 255 {
        return Err("the name is empty or too long".to_string());
    }
    Ok((name.to_string(), snapshot.parse().map_err(|error: crate::snapshot::NameError| error.to_string())?))
}

/// Serves until a signal ends it.
///
/// # Errors
/// A snapshot cannot be opened; the address or the certificates cannot be used.
pub async fn run(args: &ShareArgs) -> Result<(), SourceError> {
    let tls = args.tls.files().ok_or_else(|| SourceError::Malformed {
        snapshot: args.listen.to_string(),
        why: "peers are told apart by certificates: --certificates, --key and --authorities are needed".to_string(),
    })?;
    let cache = BlockCache::new(&CacheOptions::default())?;
    let with = OpenWith { cache: Some(cache), tls: Some(tls.clone()), ..OpenWith::default() };
    let mut snapshots = HashMap::new();
    for (name, snapshot) in &args.shared {
        let source = snapshot.open(&with).await?;
        if snapshots.insert(name.clone(), Arc::clone(&source)).is_some() {
            let why = "two snapshots have this name".to_string();
            return Err(SourceError::Malformed { snapshot: name.clone(), why });
        }
    }
    let server = PeerServer::bind(args.listen, &tls, snapshots).await?;
    if let Ok(address) = server.address() {
        println!("listening at {address}");
    }
    tokio::select! {
        () = server.serve() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    Ok(())
}
