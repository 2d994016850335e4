{{/*
Labels of a GPU node, each with the program or the cloud that sets it.
  nvidia.com/gpu.present         NVIDIA's GPU operator (gpu-operator, controllers/state_manager.go), and by hand where its
                                 device plugin's chart is to be forced onto a node (k8s-device-plugin, values.yaml)
  nvidia.com/gpu.count           GPU feature discovery (k8s-device-plugin, docs/gpu-feature-discovery)
  nvidia.com/gpu                 a custom of examples, as eksctl's
  feature.node.kubernetes.io/…   Node Feature Discovery: NVIDIA's PCI vendor, by its classes 0300 (VGA) and 0302 (3D) or
                                 without a class; the three that the GPU operator takes (state_manager.go). NVIDIA's CPU
                                 with a GPU on the chip, as the device plugin's chart has it
  cloud.google.com/gke-accelerator            GKE, on nodes with GPUs
  karpenter.k8s.aws/instance-gpu-manufacturer Karpenter on AWS (well-known labels)
  eks.amazonaws.com/instance-gpu-manufacturer EKS Auto Mode (EKS user guide)
  k8s.amazonaws.com/accelerator               EKS node groups, for the cluster autoscaler (autoscaler, cloudprovider/aws)
  kubernetes.azure.com/accelerator            AKS (its labels of node pools); accelerator before that
  karpenter.azure.com/sku-gpu-manufacturer    Karpenter on Azure
  doks.digitalocean.com/gpu-brand             DigitalOcean Kubernetes
  ibm-cloud.kubernetes.io/gpu-enabled         IBM Cloud Kubernetes Service
  aliyun.accelerator/nvidia_name              Aliyun ACK
  gpushare                                    AliyunContainerService/gpushare-device-plugin's nodeSelector
  nvidia-device-enable                        tkestack/gpu-manager's nodeSelector, and Tencent's TKE
  gpu                                         HAMi's nodeSelector is gpu=on; gpu=true is a custom of hand-made clusters
*/}}
{{- define "gpumap.gpuNodeLabels" -}}
- {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
- {key: nvidia.com/gpu.count, operator: Gt, values: ["0"]}
- {key: nvidia.com/gpu, operator: In, values: ["true", present]}
- {key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}
- {key: feature.node.kubernetes.io/pci-0300_10de.present, operator: In, values: ["true"]}
- {key: feature.node.kubernetes.io/pci-0302_10de.present, operator: In, values: ["true"]}
- {key: feature.node.kubernetes.io/cpu-model.vendor_id, operator: In, values: [NVIDIA]}
- {key: cloud.google.com/gke-accelerator, operator: Exists}
- {key: karpenter.k8s.aws/instance-gpu-manufacturer, operator: In, values: [nvidia]}
- {key: eks.amazonaws.com/instance-gpu-manufacturer, operator: In, values: [nvidia]}
- {key: k8s.amazonaws.com/accelerator, operator: Exists}
- {key: kubernetes.azure.com/accelerator, operator: In, values: [nvidia]}
- {key: accelerator, operator: In, values: [nvidia]}
- {key: karpenter.azure.com/sku-gpu-manufacturer, operator: In, values: [nvidia]}
- {key: doks.digitalocean.com/gpu-brand, operator: In, values: [nvidia]}
- {key: ibm-cloud.kubernetes.io/gpu-enabled, operator: In, values: ["true"]}
- {key: aliyun.accelerator/nvidia_name, operator: Exists}
- {key: gpushare, operator: In, values: ["true"]}
- {key: nvidia-device-enable, operator: In, values: [enable]}
- {key: gpu, operator: In, values: ["on", "true"]}
{{- end -}}

{{/*
Keeps the agent off a node while its driver changes. From 26.7 on, the GPU operator labels GPU nodes "true"
(state_manager.go). Its driver manager changes that to paused-for-driver-upgrade (k8s-driver-manager), its MIG manager to
paused-for-mig-change (mig-parted), its vGPU manager to paused-for-vgpu-change. An administrator may set false. The
DaemonSet's controller then ends the pod. The managers wait only for pods with this label in their nodeSelector, which
gpumap's pods do not have. NotIn also matches nodes without the label. In ["true"] would need each term below twice.
*/}}
{{- define "gpumap.clientNotPaused" -}}
key: nvidia.com/gpu.deploy.client
operator: NotIn
values: ["false", paused-for-driver-upgrade, paused-for-mig-change, paused-for-vgpu-change]
{{- end -}}

{{/* "true" if nodeSelector or affinity requires certain nodes. Preferences and affinity to pods do not count. */}}
{{- define "gpumap.nodesChosen" -}}
{{- if or .Values.nodeSelector (include "gpumap.requiredTerms" . | fromYamlArray) }}true{{ end -}}
{{- end -}}

{{- define "gpumap.requiredTerms" -}}
{{- $required := dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" dict (.Values.affinity | default dict) -}}
{{- $required.nodeSelectorTerms | default list | toYaml -}}
{{- end -}}

{{/* Only Linux: clusters of AKS and EKS can have GPU nodes with Windows. The kubelet sets this label. */}}
{{- define "gpumap.nodeSelector" -}}
{{- $selector := mergeOverwrite (dict "kubernetes.io/os" "linux") (.Values.nodeSelector | default dict) -}}
{{- if .Values.gpuOperator.followDcgmExporter -}}
{{- $_ := set $selector "nvidia.com/gpu.deploy.dcgm-exporter" "true" -}}
{{- end -}}
{{- toYaml $selector -}}
{{- end -}}

{{/* Terms of a node selector are alternatives: a condition for all of them is added to each. */}}
{{- define "gpumap.affinity" -}}
{{- $affinity := deepCopy (.Values.affinity | default dict) -}}
{{- $node := $affinity.nodeAffinity | default dict -}}
{{- $terms := include "gpumap.requiredTerms" . | fromYamlArray -}}
{{- if and .Values.gpuNodesOnly (not (include "gpumap.nodesChosen" .)) -}}
{{- range include "gpumap.gpuNodeLabels" . | fromYamlArray -}}
{{- $terms = append $terms (dict "matchExpressions" (list .)) -}}
{{- end -}}
{{- end -}}
{{- if .Values.gpuOperator.followClient -}}
{{- $notPaused := include "gpumap.clientNotPaused" . | fromYaml -}}
{{- $both := list -}}
{{- range $terms | default (list dict) -}}
{{- $expressions := append (.matchExpressions | default list) $notPaused -}}
{{- $both = append $both (mergeOverwrite (deepCopy .) (dict "matchExpressions" $expressions)) -}}
{{- end -}}
{{- $terms = $both -}}
{{- end -}}
{{- if $terms -}}
{{- $required := dict "nodeSelectorTerms" $terms -}}
{{- $node = mergeOverwrite (deepCopy $node) (dict "requiredDuringSchedulingIgnoredDuringExecution" $required) -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- end -}}
{{- with $affinity }}{{ toYaml . }}{{ end -}}
{{- end -}}
