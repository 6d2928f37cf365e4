//! The committed steps of a cluster: list, show and remove.

use std::collections::BTreeMap;

use super::connection::{Client, LONG_LIMIT};
use super::error::ClientError;
use crate::format::launch_order::LaunchOrder;
use crate::format::records::{ShardRoot, ShardState};
use crate::id::{Job, Label, LaunchId, SaveId, Step, StepRef};
use crate::wire::calls::{
    GetPolicyStatus, Hello, LabelChange, LabelStep, LabelledStep, LaunchClaim, LaunchView,
    ListLabels, ListLaunches, ListOpenSaves, ListSteps, NodeView, OpenSaveView, RegisterLaunch,
    RemoveAnswer, RemoveLaunchStep, RemoveStep, ShowStep, ShowStepAnswer, StepView,
};

/// A committed step and its shards.
#[derive(Debug, Clone)]
pub struct CommittedStep {
    /// The step.
    pub step: StepView,
    /// The step's shards, and how far their archiving has come.
    pub shards: Vec<(ShardRoot, ShardState)>,
}

/// A committed step with its shards, the nodes, and the reason why nothing can be changed now.
#[derive(Debug, Clone)]
pub struct ShowReport {
    /// The step.
    pub step: StepView,
    /// The step's shards, and how far their archiving has come.
    pub shards: Vec<(ShardRoot, ShardState)>,
    /// The nodes. A node that answers counts as live, with or without a lease.
    pub nodes: Vec<NodeView>,
    /// The reason why nothing can be changed now. It is determined only if some node has no lease,
    /// or no catalogue answers.
    pub read_only_reason: Option<String>,
}

impl Client {
    /// Returns the committed steps of a job (`None`: of all jobs), in order of job and step.
    pub async fn list_steps(&self, job: Option<&Job>) -> Result<Vec<StepView>, ClientError> {
        let (mut steps, mut after) = (Vec::new(), None);
        loop {
            let page = self.ask_about_steps(&ListSteps { job: job.cloned(), after }).await?;
            steps.extend(page.steps);
            match page.next {
                Some(next) => after = Some(next),
                None => return Ok(steps),
            }
        }
    }

    /// Returns the first saves of a job (`None`: of all jobs) that are not committed yet, at most
    /// 64 in total.
    pub async fn list_open_saves(
        &self,
        job: Option<&Job>,
    ) -> Result<Vec<OpenSaveView>, ClientError> {
        self.call_gateway(&ListOpenSaves { job: job.cloned() }).await
    }

    /// Registers a launch as the newest one of its job, or confirms that it is (docs/semantics.md,
    /// 3). `resumed` is the step that the launch loaded.
    ///
    /// # Errors
    /// Fails with kind `Fenced` if another launch is newer.
    pub async fn register_launch(
        &self,
        job: &Job,
        launch: LaunchId,
        resumed: Option<Step>,
        claim: LaunchClaim,
    ) -> Result<(), ClientError> {
        let call = RegisterLaunch { job: job.clone(), launch, resumed, claim };
        self.call_any_gateway_within(&call, LONG_LIMIT).await
    }

    /// Returns the newest launch of each job.
    pub async fn list_newest_launches(&self) -> Result<Vec<LaunchView>, ClientError> {
        let mut launches: Vec<LaunchView> = Vec::new();
        loop {
            let after = launches.last().map(|view| view.job.clone());
            let page = self.call_gateway(&ListLaunches { job: None, after }).await?;
            if page.is_empty() {
                return Ok(launches);
            }
            launches.extend(page);
        }
    }

    /// Returns the order of a job's launches.
    pub async fn fetch_launch_order(&self, job: &Job) -> Result<LaunchOrder, ClientError> {
        let call = ListLaunches { job: Some(job.clone()), after: None };
        let views = self.call_gateway(&call).await?;
        Ok(LaunchOrder { launches: views.into_iter().map(|view| view.registered).collect() })
    }

    /// Returns `step`, or the newest committed step of the job if it is `None`.
    pub(super) async fn resolve_step(
        &self,
        job: &Job,
        step: Option<Step>,
    ) -> Result<Step, ClientError> {
        match step {
            Some(step) => Ok(step),
            None => Ok(self.fetch_step(job, None).await?.step.step),
        }
    }

    pub(super) async fn fetch_step(
        &self,
        job: &Job,
        step: Option<Step>,
    ) -> Result<ShowStepAnswer, ClientError> {
        let call = ShowStep { job: job.clone(), step, first_shard: 0 };
        let mut answer = self.ask_about_steps(&call).await?;
        while (answer.shards.len() as u64) < u64::from(answer.step.saved.shards) {
            let first_shard = answer.shards.len() as u32;
            let page = self
                .ask_about_steps(&ShowStep {
                    job: job.clone(),
                    step: Some(answer.step.step),
                    first_shard,
                })
                .await?;
            if page.step.saved != answer.step.saved || page.shards.is_empty() {
                return Err(ClientError::Removed { job: job.clone(), step: answer.step.step });
            }
            answer.shards.extend(page.shards);
        }
        Ok(answer)
    }

    /// Returns a committed step (`None`: the latest) with its shards. Asks the gateway only, however
    /// many nodes are down.
    pub async fn fetch_committed_step(
        &self,
        job: &Job,
        step: Option<Step>,
    ) -> Result<CommittedStep, ClientError> {
        let found = self.fetch_step(job, step).await?;
        let step = found.step;
        let shards = found.shards.into_iter().map(|(root, state)| match state {
            Some(state) => Ok((root, state)),
            None => Err(ClientError::Removed { job: job.clone(), step: step.step }),
        });
        let shards = shards.collect::<Result<_, _>>()?;
        Ok(CommittedStep { step, shards })
    }

    /// Returns all information about a committed step (`None`: the latest). Asks the nodes that have
    /// no lease whether they answer, which takes seconds if one does not.
    pub async fn show_step(
        &self,
        job: &Job,
        step: Option<Step>,
    ) -> Result<ShowReport, ClientError> {
        let CommittedStep { step, shards } = self.fetch_committed_step(job, step).await?;
        let nodes = self.fetch_known_nodes().await?;
        // If all nodes have leases, the catalogue works and no node has to be asked.
        let is_well = !step.by_marks && nodes.iter().all(|view| view.live);
        let (nodes, unchanged) = match is_well {
            true => (nodes, None),
            false => (
                self.probe_liveness(nodes).await,
                self.fetch_catalogue_report().await?.read_only_reason,
            ),
        };
        Ok(ShowReport { step, shards, nodes, read_only_reason: unchanged })
    }

    /// Removes the save that is now committed as the step. A save that replaces it meanwhile stays,
    /// however late the request arrives. Returns the number of nodes that have removed all files,
    /// and the nodes that will be asked again.
    pub async fn remove_step(&self, job: &Job, step: Step) -> Result<RemoveAnswer, ClientError> {
        let save = self.find_committed_save(job.at(step)).await?;
        self.remove_save(job.at(step), save).await
    }

    /// Removes `save` if it is still the one that is committed as the step. Returns the same as
    /// [`Client::remove_step`].
    ///
    /// # Errors
    /// Fails with kind `Fenced` if another save is committed as the step.
    pub async fn remove_save(
        &self,
        step_ref: StepRef<'_>,
        save: SaveId,
    ) -> Result<RemoveAnswer, ClientError> {
        let StepRef { job, step } = step_ref;
        // Ask only once. A repeated request could report as missing what the first one has removed.
        self.call_gateway_once(&RemoveStep { job: job.clone(), step, save }, LONG_LIMIT).await
    }

    /// Removes `save` on behalf of a launch, if it is still committed as the step.
    ///
    /// # Errors
    /// Fails with kind `Fenced` if the launch is not the newest one of the job, or if another save is
    /// committed as the step.
    pub async fn remove_launch_step(
        &self,
        step_ref: StepRef<'_>,
        save: SaveId,
        launch: LaunchId,
    ) -> Result<RemoveAnswer, ClientError> {
        let remove = RemoveStep { job: step_ref.job.clone(), step: step_ref.step, save };
        self.call_gateway_once(&RemoveLaunchStep { remove, launch }, LONG_LIMIT).await
    }

    /// Adds a label to a committed step, or removes one (docs/semantics.md, 9). Returns the labels that
    /// the step has then.
    pub async fn label_step(
        &self,
        step_ref: StepRef<'_>,
        label: &Label,
        change: LabelChange,
    ) -> Result<Vec<Label>, ClientError> {
        let save = self.find_committed_save(step_ref).await?;
        let (job, step, label) = (step_ref.job.clone(), step_ref.step, label.clone());
        self.call_gateway(&LabelStep { job, step, save, label, change }).await
    }

    /// Returns the labels of a job's committed steps. Steps without labels are left out.
    pub async fn list_labels(&self, job: &Job) -> Result<BTreeMap<Step, Vec<Label>>, ClientError> {
        let mut labelled: Vec<LabelledStep> = Vec::new();
        loop {
            let after = labelled.last().map(|found| found.step);
            let page = self.call_gateway(&ListLabels { job: job.clone(), after }).await?;
            if page.is_empty() {
                break;
            }
            labelled.extend(page);
        }
        if labelled.is_empty() {
            return Ok(BTreeMap::new());
        }
        let committed = self.list_steps(Some(job)).await?;
        let is_committed = |found: &LabelledStep| {
            committed.iter().any(|view| (view.step, view.saved.save) == (found.step, found.save))
        };
        labelled.retain(|found| is_committed(found) && !found.labels.is_empty());
        Ok(labelled.into_iter().map(|found| (found.step, found.labels)).collect())
    }

    /// Returns the id of the save that is committed as the step.
    pub async fn find_committed_save(&self, step_ref: StepRef<'_>) -> Result<SaveId, ClientError> {
        let StepRef { job, step } = step_ref;
        let before = step.0.checked_sub(1).map(|before| (job.clone(), Step(before)));
        let page =
            self.ask_about_steps(&ListSteps { job: Some(job.clone()), after: before }).await?;
        let found = page.steps.into_iter().find(|view| view.step == step);
        let found = found.ok_or_else(|| ClientError::NoStep { job: job.clone(), step })?;
        Ok(found.saved.save)
    }

    /// Returns how many of a job's newest steps the cluster's policy keeps, or `None` if the policy
    /// retires no step of the job.
    pub async fn fetch_keep_newest(&self, job: &Job) -> Result<Option<u32>, ClientError> {
        let hello = self.call_gateway(&Hello { me: None }).await?;
        let home = hello.catalogue.ok_or(ClientError::NoCatalogue)?;
        let policy = self.caller().call(&home, &GetPolicyStatus {}).await?;
        let own = policy.rules.iter().find(|rule| rule.job.as_ref() == Some(job));
        Ok(own.or(policy.rules.first()).and_then(|rule| rule.keep_newest))
    }
}
