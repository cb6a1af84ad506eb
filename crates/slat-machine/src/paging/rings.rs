//! Pages from a resolver in another thread or process, requested by rings
//! ([`slat_pager::delivery`]): what is the engine's in it. The threads that run vCPUs ask by their
//! ports, and the engine reads the bitmap that the resolver clears.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use slat::slots::{MemoryFaultFlags, UserfaultWords};
use slat_pager::delivery::{DeliveryError, DeliveryPort, Parked, Requested, SharedBitmap, Waiter};

use super::arrivals::LONGEST_SLEEP;
use super::error::VcpuError;
use super::pages::{Asked, PageSupply};

/// The bitmap that a resolver clears, as the engine reads it.
#[derive(Debug)]
pub(crate) struct EngineBitmap(pub(crate) Arc<SharedBitmap>);

impl UserfaultWords for EngineBitmap {
    fn words(&self) -> &[AtomicU64] {
        self.0.words()
    }
}

/// The rings of one thread's vCPUs.
#[derive(Debug)]
pub(crate) struct RingPages {
    ports: Vec<DeliveryPort>,
    /// Whether each of the vCPUs waits for a page.
    waits: Vec<bool>,
    waiter: Waiter,
    block_pages: u64,
}

impl RingPages {
    /// `ports` are in the order of the thread's vCPUs, all of which have `waiter`.
    pub(crate) fn new(ports: Vec<DeliveryPort>, waiter: Waiter, block_pages: u64) -> RingPages {
        RingPages { waits: vec![false; ports.len()], ports, waiter, block_pages }
    }

    /// Puts the vCPUs whose pages are there into `ready`.
    fn poll(&mut self, ready: &mut VecDeque<usize>) -> Result<(), DeliveryError> {
        for (lane, (port, waits)) in self.ports.iter_mut().zip(&mut self.waits).enumerate() {
            if *waits && port.poll()?.is_some() {
                *waits = false;
                ready.push_back(lane);
            }
        }
        Ok(())
    }
}

impl PageSupply for RingPages {
    fn still_waits(&mut self, lane: usize) -> Result<bool, VcpuError> {
        let port = &mut self.ports[lane];
        if port.nr_in_flight() > 0 && !port.try_resume()? {
            // Returns an error if the resolver is gone. No wait for another one: it had to be
            // attached before the run, and if it is gone already, the run is over.
            port.poll()?;
        }
        // A page that is there by now needs no wait. Neither does one that failed: the vCPU exits
        // for it again.
        while port.nr_in_flight() == 0 && port.poll()?.is_some() {}
        self.waits[lane] = port.nr_in_flight() > 0;
        Ok(self.waits[lane])
    }

    #[inline]
    fn ask(&mut self, lane: usize, page: u64, flags: MemoryFaultFlags) -> Result<Asked, VcpuError> {
        let requested = self.ports[lane].request(page / self.block_pages, flags.bits());
        // In either case, and after an error too: `failure_of` asks the port.
        self.waits[lane] = !matches!(requested, Ok(Requested::AlreadyThere));
        Ok(match requested? {
            Requested::AlreadyThere => Asked::IsThere,
            Requested::InFlight => Asked::Waits,
        })
    }

    fn collect(&mut self, ready: &mut VecDeque<usize>) -> Result<(), VcpuError> {
        Ok(self.poll(ready)?)
    }

    fn sleep(&mut self, ready: &mut VecDeque<usize>) -> Result<(), VcpuError> {
        self.waiter.announce();
        let polled = self.poll(ready);
        if polled.is_err() || !ready.is_empty() {
            self.waiter.withdraw();
            return Ok(polled?);
        }
        if self.waiter.park(LONGEST_SLEEP)? == Parked::TimedOut {
            for port in &mut self.ports {
                port.check()?;
            }
        }
        Ok(())
    }

    fn failure_of(&mut self, lane: usize) -> Option<VcpuError> {
        if !self.waits[lane] {
            return None;
        }
        match self.ports[lane].poll() {
            Ok(Some(_)) => {
                // It goes on from here in a later run.
                self.waits[lane] = false;
                None
            }
            Ok(None) => None,
            Err(error) => {
                // The next run requests again what is still in flight; the vCPU itself requests
                // anything else.
                self.waits[lane] = self.ports[lane].nr_in_flight() > 0;
                Some(error.into())
            }
        }
    }
}
