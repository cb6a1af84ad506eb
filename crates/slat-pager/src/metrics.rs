//! Counters of what a pager does, which cost an atomic addition each, registered or not.

use std::sync::Arc;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Histogram, HistogramOpts, IntCounter, IntGauge, Opts, Registry};

use crate::source::cache::BlockCache;

/// Latencies from 2 us to 4 s, each bucket twice the one before.
const LATENCY_BUCKETS: usize = 22;

/// What was counted for the machines of one socket, or of a library's caller.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the descriptions in `new` say it")]
pub struct Metrics {
    pub vms: IntGauge,
    pub vms_served: IntCounter,
    pub refused: IntCounter,
    pub taken_over: IntCounter,
    pub faults: IntCounter,
    pub faults_in_flight: IntCounter,
    pub latency_seconds: Histogram,
    pub filled_bytes: IntCounter,
    pub zero_bytes: IntCounter,
    pub pages_there: IntCounter,
    pub mapped_bytes: IntCounter,
    pub read_bytes: IntCounter,
    pub reads_in_flight: IntGauge,
    pub source_errors: IntCounter,
    pub removed_bytes: IntCounter,
    pub to_replay_bytes: IntCounter,
    pub replayed_bytes: IntCounter,
    pub tried_again: IntCounter,
    pub poisoned_pages: IntCounter,
    pub violations: IntCounter,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new("")
    }
}

impl Metrics {
    /// All zero, for the socket `socket`.
    pub fn new(socket: &str) -> Metrics {
        let options =
            |name: &str, help: &str| Opts::new(format!("slat_pager_{name}"), help).const_label("socket", socket);
        // A counter is refused for its name alone, and these names are good.
        let counter = |name, help| IntCounter::with_opts(options(name, help)).expect("a good name");
        let gauge = |name, help| IntGauge::with_opts(options(name, help)).expect("a good name");
        let buckets = prometheus::exponential_buckets(2e-6, 2.0, LATENCY_BUCKETS).expect("growing buckets");
        let latency = HistogramOpts {
            common_opts: options("fault_latency_seconds", "From reading a fault's message to the fill of its page."),
            buckets,
        };
        Metrics {
            vms: gauge("vms", "Machines that are served now."),
            vms_served: counter("vms_served_total", "Machines that were ever served."),
            refused: counter("refused_total", "Handshakes that were refused."),
            taken_over: counter("taken_over_total", "Machines that were taken over from a dead pager."),
            faults: counter("faults_total", "Messages of faults that were read."),
            faults_in_flight: counter("faults_in_flight_total", "Faults whose page was on its way already."),
            latency_seconds: Histogram::with_opts(latency).expect("a good name"),
            filled_bytes: counter("filled_bytes_total", "Bytes of pages that were filled."),
            zero_bytes: counter("zero_bytes_total", "Bytes of pages that were filled with zeros."),
            pages_there: counter("pages_there_total", "Pages that were there when they were to be filled."),
            mapped_bytes: counter("mapped_bytes_total", "Bytes that were had without a read of the source."),
            read_bytes: counter("read_bytes_total", "Bytes that were read from the source."),
            reads_in_flight: gauge("reads_in_flight", "Reads of the source at this moment."),
            source_errors: counter("source_errors_total", "Reads of the source that failed."),
            removed_bytes: counter("removed_bytes_total", "Bytes that monitors have given up (balloon, reporting)."),
            to_replay_bytes: counter("to_replay_bytes_total", "Bytes of working sets whose replay has begun."),
            replayed_bytes: counter("replayed_bytes_total", "Bytes of working sets that were replayed."),
            tried_again: counter("tried_again_total", "Fills that the kernel put off (EAGAIN)."),
            poisoned_pages: counter("poisoned_pages_total", "Pages that could not be had and were poisoned."),
            violations: counter("violations_total", "Monitors that said something untrue about their memory."),
        }
    }

    /// Adds them to `registry`.
    ///
    /// # Errors
    /// They are there already.
    pub fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        let counters = [
            &self.vms_served,
            &self.refused,
            &self.taken_over,
            &self.faults,
            &self.faults_in_flight,
            &self.filled_bytes,
            &self.zero_bytes,
            &self.pages_there,
            &self.mapped_bytes,
            &self.read_bytes,
            &self.source_errors,
            &self.removed_bytes,
            &self.to_replay_bytes,
            &self.replayed_bytes,
            &self.tried_again,
            &self.poisoned_pages,
            &self.violations,
        ];
        counters.into_iter().try_for_each(|counter| registry.register(Box::new(counter.clone())))?;
        registry.register(Box::new(self.vms.clone()))?;
        registry.register(Box::new(self.reads_in_flight.clone()))?;
        registry.register(Box::new(self.latency_seconds.clone()))
    }
}

/// What a cache of blocks did, asked for at each scrape.
#[derive(Debug)]
pub struct CacheMetrics {
    cache: Arc<BlockCache>,
    descriptions: Vec<Desc>,
}

impl CacheMetrics {
    /// Of `cache`, which serves all sockets.
    pub fn new(cache: Arc<BlockCache>) -> CacheMetrics {
        let mut metrics = CacheMetrics { cache, descriptions: Vec::new() };
        metrics.descriptions = metrics.now().iter().flat_map(|metric| metric.desc().into_iter().cloned()).collect();
        metrics
    }

    fn now(&self) -> Vec<Box<dyn Collector>> {
        // As in `Metrics::new`.
        let options = |name: &str, help: &str| Opts::new(format!("slat_pager_cache_{name}"), help);
        let counter = |name: &str, help: &str, value: u64| -> Box<dyn Collector> {
            let counter = IntCounter::with_opts(options(name, help)).expect("a good name");
            counter.inc_by(value);
            Box::new(counter)
        };
        let gauge = |name: &str, help: &str, value: u64| -> Box<dyn Collector> {
            let gauge = IntGauge::with_opts(options(name, help)).expect("a good name");
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
            Box::new(gauge)
        };
        let figures = self.cache.figures();
        vec![
            counter("memory_hits_total", "Reads of blocks that were in memory.", figures.nr_memory_hits),
            counter("disk_hits_total", "Reads of blocks that were on the disk.", figures.nr_disk_hits),
            counter("fetched_blocks_total", "Blocks that were fetched.", figures.nr_fetched),
            counter("read_ahead_blocks_total", "Of them, blocks that were read ahead.", figures.nr_read_ahead),
            counter("fetched_bytes_total", "Bytes of blocks that were fetched.", figures.fetched_bytes),
            counter("corrupt_files_total", "Files that were not what was written.", figures.nr_corrupt),
            counter("not_written_total", "Blocks that did not get to the disk.", figures.nr_not_written),
            gauge("memory_bytes", "Bytes of blocks in memory.", figures.memory_bytes),
            gauge("disk_bytes", "Bytes of files on the disk.", figures.disk_bytes),
        ]
    }
}

impl Collector for CacheMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.descriptions.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.now().iter().flat_map(|metric| metric.collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use prometheus::{Encoder, TextEncoder};

    use super::*;
    use crate::source::cache::CacheOptions;

    #[test]
    fn all_that_is_counted_is_told() {
        let registry = Registry::new();
        let metrics = Metrics::new("/run/pager.sock");
        metrics.register(&registry).unwrap();
        metrics.register(&registry).expect_err("twice");
        let cache = BlockCache::new(&CacheOptions::default()).unwrap();
        registry.register(Box::new(CacheMetrics::new(Arc::clone(&cache)))).unwrap();
        registry.register(Box::new(CacheMetrics::new(cache))).expect_err("twice");
        metrics.faults.inc_by(7);
        let mut text = Vec::new();
        TextEncoder::new().encode(&registry.gather(), &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        for line in ["slat_pager_faults_total{socket=\"/run/pager.sock\"} 7", "slat_pager_cache_memory_hits_total 0"] {
            assert!(text.lines().any(|told| told == line), "{line} in {text}");
        }
        // Each field but the histogram's is one line, and the cache's are nine.
        assert_eq!(text.lines().filter(|line| line.starts_with("# TYPE")).count(), 20 + 9);
    }
}
