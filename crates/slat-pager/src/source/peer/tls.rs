//! Certificates of peers, from files.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::Stream;
use crate::source::SourceError;

/// What both sides must say to speak this protocol.
const PROTOCOL: &[u8] = b"slat-peer/1";

/// PEM files: what this side proves itself with, and what the other side must.
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TlsFiles {
    /// The certificate of this side, and those between it and its authority.
    pub certificates: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities whose certificates the other side may have.
    pub authorities: PathBuf,
}

impl TlsFiles {
    /// What a server needs.
    pub(super) fn server(&self) -> Result<Arc<ServerConfig>, SourceError> {
        let (certificates, key, authorities) = self.read()?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(authorities), provider())
            .build()
            .map_err(|error| wrong(&self.authorities, &error))?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_client_cert_verifier(verifier).with_single_cert(certificates, key))
            .map_err(|error| wrong(&self.certificates, &error))?;
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(Arc::new(config))
    }

    fn client(&self) -> Result<Arc<ClientConfig>, SourceError> {
        let (certificates, key, authorities) = self.read()?;
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_root_certificates(authorities).with_client_auth_cert(certificates, key))
            .map_err(|error| wrong(&self.certificates, &error))?;
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(Arc::new(config))
    }

    /// A client of the pager at `address` (`host:port`).
    pub(super) fn client_of(&self, address: &str) -> Result<TlsClient, SourceError> {
        let malformed = |why: &str| SourceError::Malformed { snapshot: address.to_string(), why: why.to_string() };
        let (host, _) = address.rsplit_once(':').ok_or_else(|| malformed("an address is host:port"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_string();
        let host = ServerName::try_from(host).map_err(|_| malformed("its host is none"))?;
        Ok(TlsClient { address: address.to_string(), host, config: self.client()? })
    }

    fn read(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, RootCertStore), SourceError> {
        let certificates = certificates(&self.certificates)?;
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|error| wrong(&self.key, &error))?;
        let mut authorities = RootCertStore::empty();
        for authority in self::certificates(&self.authorities)? {
            authorities.add(authority).map_err(|error| wrong(&self.authorities, &error))?;
        }
        Ok((certificates, key, authorities))
    }
}

/// Connects to a pager by TLS.
#[derive(Debug)]
pub(super) struct TlsClient {
    /// Host and port.
    address: String,
    host: ServerName<'static>,
    config: Arc<ClientConfig>,
}

impl TlsClient {
    pub(super) async fn connect(&self) -> io::Result<Box<dyn Stream>> {
        let stream = TcpStream::connect(&self.address).await?;
        super::keep_alive(&stream)?;
        let connector = TlsConnector::from(Arc::clone(&self.config));
        Ok(Box::new(connector.connect(self.host.clone(), stream).await?))
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, SourceError> {
    let certificates: Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(path).map_err(|error| wrong(path, &error))?.collect();
    match certificates {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(wrong(path, &"it has no certificate")),
        Err(error) => Err(wrong(path, &error)),
    }
}

fn wrong(path: &Path, why: &dyn std::fmt::Display) -> SourceError {
    SourceError::Io {
        what: format!("use {}", path.display()),
        error: io::Error::new(io::ErrorKind::InvalidInput, why.to_string()),
    }
}
